"""Lines of the processes that make batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from stepscope.analysis.lines.facts import Lines, Loading, Place
from stepscope.analysis.lines.observed import LoaderSamples


def with_loading(lines: Lines, samples: Sequence[LoaderSamples], loading_ms: float | None) -> Lines:
    """Add the samples of all these processes, and the time per step that the program waits for
    them."""
    counts: Counter[tuple[Place, bool]] = Counter()
    for process in samples:
        for one in process.lines:
            place = Place(file=one.file, line=one.line, function=one.function, code=one.code)
            counts[place, process.in_worker] += one.samples
    first = len(lines.places)
    return msgspec.structs.replace(
        lines,
        places=(*lines.places, *(place for place, _ in counts)),
        loading=tuple(
            Loading(
                place=first + index,
                samples=count,
                total=sum(one.total for one in samples),
                in_worker=in_worker,
            )
            for index, ((_, in_worker), count) in enumerate(counts.items())
        ),
        loading_ms=loading_ms or 0.0,
    )
