"""Causal masks as offsets and tiles. Imports without torch; integers only.

Query `i` sees key `j` if `j <= i + offset`. The offset is 0 if the first query is aligned with the
first key (top-left), and `seq_k - seq_q` if the last query is aligned with the last key
(bottom-right).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

TOP_LEFT = "top-left"
BOTTOM_RIGHT = "bottom-right"
ALIGNMENTS = (TOP_LEFT, BOTTOM_RIGHT)


def causal_offset(seq_q: int, seq_k: int, causal_align: str | None) -> int:
    """Return the offset from a query's position to the last key that it sees."""
    if causal_align is not None and causal_align not in ALIGNMENTS:
        raise ValueError(f"causal_align={causal_align!r} is neither {' nor '.join(ALIGNMENTS)}")
    if seq_q == seq_k or causal_align == TOP_LEFT:
        return 0
    if causal_align == BOTTOM_RIGHT:
        return seq_k - seq_q
    raise ValueError(
        f"causal attention of {seq_q} queries over {seq_k} keys is ambiguous: "
        f"give causal_align={TOP_LEFT!r} (the first query sees the first key) "
        f"or {BOTTOM_RIGHT!r} (the last query sees the last key)"
    )


@dataclass(frozen=True)
class CausalMask:
    """The visible keys of each query of one attention, causal or not."""

    seq_q: int
    seq_k: int
    offset: int | None
    """None if every query sees every key."""

    @classmethod
    def of(cls, seq_q: int, seq_k: int, is_causal: bool, causal_align: str | None) -> CausalMask:
        return cls(seq_q, seq_k, causal_offset(seq_q, seq_k, causal_align) if is_causal else None)

    @property
    def fully_masked_rows(self) -> int:
        """Number of leading queries without a visible key; every later one sees the first key."""
        if self.seq_k == 0:
            return self.seq_q
        return 0 if self.offset is None else max(0, -self.offset)

    def row_tiles(self, size: int) -> Iterator[slice]:
        """Iterate over tiles of the queries that see at least one key."""
        return tiles(self.fully_masked_rows, self.seq_q, size)

    def key_tiles(self, rows: slice, size: int) -> Iterator[tuple[slice, bool]]:
        """Iterate over tiles of the keys that these rows see, each with whether it needs a mask."""
        if self.offset is None:
            yield from ((keys, False) for keys in tiles(0, self.seq_k, size))
            return
        for keys in tiles(0, min(self.seq_k, rows.stop + self.offset), size):
            yield keys, keys.stop - 1 > rows.start + self.offset


def tiles(start: int, stop: int, size: int) -> Iterator[slice]:
    """Iterate over tiles of a range; the last one may be shorter."""
    return (slice(first, min(first + size, stop)) for first in range(start, stop, size))
