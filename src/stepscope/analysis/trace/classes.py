"""The class of each piece of work: by its name, and where that does not tell, by who launched it.

The sort inside of an embedding's backward is called like any sort, and a template of Inductor may
have no name but a number: the operator around the launch says what they are for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from stepscope.analysis.kernels.names import CLASSES, Class, Description
from stepscope.analysis.kernels.operators import named_class
from stepscope.analysis.trace.host import BACKWARD, Host
from stepscope.analysis.trace.model import Ints, Trace
from stepscope.analysis.trace.nesting import NOBODY

_NUMBER: dict[Class, int] = {kind: place for place, kind in enumerate(CLASSES)}
_OTHER = _NUMBER["other"]
_TEMPLATE = "triton_tem_"


def classes(
    trace: Trace, host: Host, descriptions: Mapping[int, Description], name: Ints, span: Ints
) -> Ints:
    """The class of every kernel, or of every operator on a CPU, as numbers of `CLASSES`."""
    of_name = np.zeros(max(1, len(trace.names)), np.int64)
    for each, about in descriptions.items():
        of_name[each] = _NUMBER[about.kind]
    kind = of_name[name]
    if trace.on_device:
        unclear = np.flatnonzero((kind == _OTHER) & (span != NOBODY))
        told: dict[tuple[int, int], int] = {}
        for place, key in zip(
            unclear.tolist(), zip(name[unclear].tolist(), span[unclear].tolist(), strict=True),
            strict=True,
        ):  # fmt: skip
            if key not in told:
                told[key] = _NUMBER[_by_context(trace, host, trace.names[key[0]], key[1])]
            kind[place] = told[key]
    return kind


def _by_context(trace: Trace, host: Host, kernel: str, span: int) -> Class:
    is_template = kernel.startswith(_TEMPLATE)
    for around in _around(host, span):
        name = trace.names[trace.spans.name[around]]
        if trace.spans.is_range[around]:
            # A range named so holds projections too, but products have names of their own.
            if is_template and "attention" in name.lower():
                return "attention"
        else:
            found = named_class(name)
            if found is not None:
                return found
    return "other"


def _around(host: Host, span: int) -> Iterator[int]:
    """The span and all around it, then those around the forward that made it."""
    made_by = host.forward_of[span] if host.phase[span] == BACKWARD else NOBODY
    for begin in (span, int(made_by)):
        while begin != NOBODY:
            yield begin
            begin = int(host.parent[begin])
