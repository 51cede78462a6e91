"""The combinations of parameters that kernels are tested with in the interpreter."""

from __future__ import annotations

import itertools

from pairwise import covering


def test_every_pair_of_values_is_in_a_combination() -> None:
    columns = [[1, 2, 3, 4], ["a", "b", "c"], [False, True], [False, True], [None, 0]]
    chosen = covering(columns)
    for (i, one), (j, other) in itertools.combinations(enumerate(columns), 2):
        assert {(case[i], case[j]) for case in chosen} == {*itertools.product(one, other)}
    assert len(chosen) < 20
