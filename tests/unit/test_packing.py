"""A file compressed in blocks is a single gzip stream."""

from __future__ import annotations

import gzip
import random
import subprocess
import zlib
from pathlib import Path

import pytest

from stepscope.measure import packing


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 1000])
def test_round_trip_of_every_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    monkeypatch.setattr(packing, "_BLOCK", 64)
    data = random.Random(length).randbytes(length)
    plain, packed = tmp_path / "plain", tmp_path / "new" / "packed.gz"
    plain.write_bytes(data)
    packing.pack(plain, packed)
    stream = zlib.decompressobj(zlib.MAX_WBITS | 16)
    # A single member with no data after it: some readers stop after the first member.
    assert stream.decompress(packed.read_bytes()) == data
    assert stream.eof
    assert stream.unused_data == b""
    assert gzip.decompress(packed.read_bytes()) == data
    subprocess.run(["gzip", "-t", str(packed)], check=True)


def test_repetitive_data_compresses_well(tmp_path: Path) -> None:
    plain, packed = tmp_path / "plain", tmp_path / "packed.gz"
    plain.write_bytes(b'{"ph": "X", "cat": "kernel"},' * 400_000)
    packing.pack(plain, packed)
    assert packed.stat().st_size * 100 < plain.stat().st_size
