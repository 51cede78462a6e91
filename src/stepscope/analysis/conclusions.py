"""Conclusions: causes, rankings and recommendations, which need effects that are shown.

`Finding.conclusion` takes a `Conclusion` only, and only this module makes one: a view that explains
a difference has to name the effect that shows it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NewType

if TYPE_CHECKING:
    # Effects need numpy, which a page that is only read does not.
    from stepscope.analysis.effects import Effect

Conclusion = NewType("Conclusion", str)
"""A sentence that follows from what was measured."""
NOTHING = Conclusion("")


def conclude(text: str, first: Effect, *others: Effect) -> Conclusion:
    """The text if every effect is shown; nothing otherwise."""
    return Conclusion(text) if all(one.shown for one in (first, *others)) else NOTHING


def deduced(text: str) -> Conclusion:
    """A text that follows from sizes, counts, dtypes or numerical errors alone. A finding that
    rests on times cannot have one."""
    return Conclusion(text)


def joined(*conclusions: Conclusion) -> Conclusion:
    return Conclusion(" ".join(filter(None, conclusions)))
