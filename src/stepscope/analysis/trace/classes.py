"""Class of each kernel: by its name or, if that is ambiguous, by the operator that launched it.

The sort inside an embedding's backward is named like any sort, and a template of Inductor may be
named only by a number: the operator around the launch says what they are for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from stepscope.analysis.kernels.classes import CLASSES, Class
from stepscope.analysis.kernels.names import Description
from stepscope.analysis.kernels.operators import named_class
from stepscope.analysis.trace.host import BACKWARD, Host
from stepscope.analysis.trace.model import Ints, Trace
from stepscope.analysis.trace.nesting import NO_SPAN

_NUMBER: dict[Class, int] = {kind: index for index, kind in enumerate(CLASSES)}
_OTHER = _NUMBER["other"]
_TEMPLATE = "triton_tem_"


def classes(
    trace: Trace, host: Host, descriptions: Mapping[int, Description], name: Ints, span: Ints
) -> Ints:
    """Return the class of every kernel, or of every operator on a CPU, as indices of `CLASSES`."""
    of_name = np.zeros(max(1, len(trace.names)), np.int64)
    for each, about in descriptions.items():
        of_name[each] = _NUMBER[about.kind]
    kind = of_name[name]
    if trace.on_device:
        unclear = np.flatnonzero((kind == _OTHER) & (span != NO_SPAN))
        known: dict[tuple[int, int], int] = {}
        for index, key in zip(
            unclear.tolist(),
            zip(name[unclear].tolist(), span[unclear].tolist(), strict=True),
            strict=True,
        ):
            if key not in known:
                known[key] = _NUMBER[_by_context(trace, host, trace.names[key[0]], key[1])]
            kind[index] = known[key]
    return kind


def _by_context(trace: Trace, host: Host, kernel: str, span: int) -> Class:
    is_template = kernel.startswith(_TEMPLATE)
    for around in _around(host, span):
        name = trace.names[trace.spans.name[around]]
        if trace.spans.is_range[around]:
            # Such a range contains projections too, but matmuls are recognized by their own names.
            if is_template and "attention" in name.lower():
                return "attention"
        else:
            kind = named_class(name)
            if kind is not None:
                return kind
    return "other"


def _around(host: Host, span: int) -> Iterator[int]:
    """Yield the span and its ancestors, then those of the forward operator that created it."""
    created_by = host.forward_of[span] if host.phase[span] == BACKWARD else NO_SPAN
    for begin in (span, int(created_by)):
        while begin != NO_SPAN:
            yield begin
            begin = int(host.parent[begin])
