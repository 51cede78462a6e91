"""Rank and parameter in the error if the pasts of two ranks differ."""

from __future__ import annotations

import pytest

from stepscope.parallel import ParallelError
from stepscope.parallel.collective_order import Past, require_same_pasts


def past(names: str, *, ended: bool = False, first: int = 0) -> Past:
    """A lower-case letter is a gather of the forward, an upper-case one of the backward."""
    uses = [f"{'gather' if n.islower() else 'regather'} {n.lower()}" for n in names]
    return Past(first, uses, ended)


@pytest.mark.parametrize(
    ("pasts", "message"),
    [
        (
            {0: past("abc", ended=True), 1: past("ac", ended=True)},
            "rank 1 does not use b, which rank 0 uses",
        ),
        ({0: past("ac", ended=True), 1: past("abc")}, "rank 0 does not use b, which rank 1 uses"),
        ({0: past("abc"), 1: past("acC")}, "rank 1 uses c where rank 0 uses b"),
        ({0: past("abc"), 1: past("abBA")}, "rank 1 does not use c, which rank 0 uses"),
        ({0: past("abBA"), 1: past("abBaB")}, "rank 1 uses a where rank 0 uses a again"),
        ({0: past("ab"), 1: past("ba")}, "rank 1 uses b where rank 0 uses a"),
        # Rank 2 may still use b, so the message does not claim that it is skipped.
        ({0: past("ab"), 1: past("ab"), 2: past("ac")}, "rank 2 uses c where rank 0 uses b"),
        ({1: past("ab"), 3: past("a", ended=True)}, "rank 3 does not use b, which rank 1 uses"),
        ({0: past("aa"), 1: past("a", ended=True)}, "rank 1 is finished where rank 0 uses a"),
        ({0: past("yz", first=7), 1: past("xyx", first=6)}, "rank 1 uses x where rank 0 uses z"),
    ],
)
def test_the_first_difference_is_reported(pasts: dict[int, Past], message: str) -> None:
    with pytest.raises(ParallelError, match=f"^{message}"):
        require_same_pasts(pasts)


@pytest.mark.parametrize(
    "pasts",
    [
        {0: past("abc")},
        {0: past("abc"), 1: past("ab")},
        {0: past("ab"), 1: past("abc"), 2: past("")},
        {0: past("abc", ended=True), 1: past("abc", ended=True)},
        {0: past("bc", first=1), 1: past("abc")},
    ],
)
def test_a_rank_that_is_only_behind_raises_no_error(pasts: dict[int, Past]) -> None:
    require_same_pasts(pasts)
