"""A file packed by blocks is one gzip stream to everyone who reads it."""

from __future__ import annotations

import gzip
import random
import subprocess
import zlib
from pathlib import Path

import pytest

from stepscope.measure import packing


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 1000])
def test_every_length_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    monkeypatch.setattr(packing, "_BLOCK", 64)
    data = random.Random(length).randbytes(length)
    plain, packed = tmp_path / "plain", tmp_path / "new" / "packed.gz"
    plain.write_bytes(data)
    packing.pack(plain, packed)
    whole = zlib.decompressobj(zlib.MAX_WBITS | 16)
    # One member and nothing behind it: some readers stop after the first.
    assert whole.decompress(packed.read_bytes()) == data
    assert whole.eof
    assert whole.unused_data == b""
    assert gzip.decompress(packed.read_bytes()) == data
    subprocess.run(["gzip", "-t", str(packed)], check=True)


def test_what_repeats_becomes_small(tmp_path: Path) -> None:
    plain, packed = tmp_path / "plain", tmp_path / "packed.gz"
    plain.write_bytes(b'{"ph": "X", "cat": "kernel"},' * 400_000)
    packing.pack(plain, packed)
    assert packed.stat().st_size * 100 < plain.stat().st_size
