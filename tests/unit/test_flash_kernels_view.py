"""Report blocks of the flash study about our kernels: their resources."""

from __future__ import annotations

import pytest

from flash_blocks import table
from stepscope.studies.flash.kernels import skipped_tiles
from study_records import flash_record


class TestHealth:
    @pytest.mark.parametrize(
        ("seq", "m", "n", "share"),
        [(128, 64, 64, 0.25), (128, 64, 128, 0.0), (128, 128, 64, 0.0), (256, 64, 64, 6 / 16),
         (256, 64, 128, 0.25), (100, 64, 64, 0.25)],
    )  # fmt: skip
    def test_skipped_tiles(self, seq: int, m: int, n: int, share: float) -> None:
        assert skipped_tiles(seq, m, n) == pytest.approx(share)
        # Brute force over all tiles.
        rows, columns = -(-seq // m), -(-seq // n)
        masked = sum(
            column * n > min(seq, (row + 1) * m) - 1
            for row in range(rows)
            for column in range(columns)
        )
        assert masked / (rows * columns) == pytest.approx(share)

    def test_the_table_has_the_compiled_resources(self) -> None:
        records = [
            flash_record(dtype="bfloat16", seq=512, both=9.0, registers=250, error=0.5),
            flash_record(dtype="bfloat16", seq=4096, both=1.0, registers=168, error=0.8),
            flash_record(dtype="float32", seq=4096, both=4.0, registers=255, error=1.5),
        ]
        cards = table(records, "flash-health")
        assert [(card["kernel"], card["dtype"]) for card in cards] == [
            (kernel, dtype)
            for kernel in ("forward", "key-value", "query")
            for dtype in ("bfloat16", "float32")
        ]
        card = cards[0]
        assert (card["registers"], card["spills"], card["at length"]) == (168, 0, 4096)
        assert card["tile"] == "64 × 128, 4 warps, 3 stages"
        assert card["16-bit not slower"] == "yes: 4.00× as fast"
        assert card["error"] == pytest.approx(0.8)
        assert card["skipped tiles"] == pytest.approx(skipped_tiles(4096, 64, 128))
        assert cards[1]["16-bit not slower"] is None

    def test_a_slow_16_bit_kernel_is_reported(self) -> None:
        records = [flash_record(dtype="bfloat16", both=2.0), flash_record(dtype="float32")]
        assert table(records, "flash-health")[0]["16-bit not slower"] == "no: 0.500× as fast"
