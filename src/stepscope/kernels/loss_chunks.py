"""Chunk sizes of the fused head and loss. No torch."""

from __future__ import annotations

CHUNK_ROWS = 8192
"""Enough rows to hide the gradient's traffic. A chunk reads and writes the float32 gradient of the
weight, 8 bytes for 6 FLOPs a row: at 700 TFLOP/s and 4.2 TB/s (an H200) 222 / rows of the time of
its matmuls."""
CHUNK_ELEMENTS = 1 << 27
"""Logits that a chunk may have in any case: 256 MiB in 16 bits."""
_ROW_MULTIPLE = 128
_COLUMN_MULTIPLE = 16


def rows_per_chunk(rows: int, vocab: int, d: int) -> int:
    """Rows of a chunk: all chunks have about the same size, and their 16-bit logits take no more
    memory than the float32 gradient of the weight, which exists anyway, or `CHUNK_ELEMENTS`."""
    most = max(min(CHUNK_ROWS, 2 * d), CHUNK_ELEMENTS // padded_columns(vocab))
    most = max(1, most // _ROW_MULTIPLE) * _ROW_MULTIPLE
    chunks = max(1, -(-rows // most))
    return max(1, -(-rows // (chunks * _ROW_MULTIPLE))) * _ROW_MULTIPLE


def padded_columns(vocab: int) -> int:
    """Columns of a row of logits, padded so that every row starts at an aligned address."""
    return -(-vocab // _COLUMN_MULTIPLE) * _COLUMN_MULTIPLE
