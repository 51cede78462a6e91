"""Chunk sizes of the fused linear cross-entropy. No torch."""

from __future__ import annotations

CHUNK_ROWS = 8192
"""Rows per chunk at which the traffic of the weight gradient costs little. A chunk reads and writes
the float32 gradient of the weight, 8 bytes per 6 FLOPs per row: at 700 TFLOP/s and 4.2 TB/s (an
H200) this takes 222 / rows of the time of its matmuls."""
CHUNK_ELEMENTS = 1 << 27
"""Logits that a chunk may always have: 256 MiB in 16 bits."""
_ROW_MULTIPLE = 128
_COLUMN_MULTIPLE = 16
_FAST_MULTIPLE = 8
"""Columns of 16 bits that fill the 16 bytes which cuBLAS's fast kernels read at once."""


def rows_per_chunk(rows: int, vocab: int, d: int) -> int:
    """Return the rows of a chunk: all chunks have about the same size, and their 16-bit logits take
    no more memory than the float32 gradient of the weight, which exists anyway, or than
    `CHUNK_ELEMENTS`."""
    limit = max(min(CHUNK_ROWS, 2 * d), CHUNK_ELEMENTS // padded_columns(vocab))
    limit = max(1, limit // _ROW_MULTIPLE) * _ROW_MULTIPLE
    chunks = max(1, -(-rows // limit))
    return max(1, -(-rows // (chunks * _ROW_MULTIPLE))) * _ROW_MULTIPLE


def padded_columns(vocab: int) -> int:
    """Return the row stride of the logits: the vocabulary padded so that every row is aligned."""
    return -(-vocab // _COLUMN_MULTIPLE) * _COLUMN_MULTIPLE


def matmul_columns(vocab: int) -> int:
    """Return the columns of the logits that matmuls compute and read: the vocabulary, padded unless
    cuBLAS has fast kernels for it."""
    return vocab if vocab % _FAST_MULTIPLE == 0 else padded_columns(vocab)
