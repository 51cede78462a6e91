"""Report blocks of the flash study about our kernels: resources and tiles."""

from __future__ import annotations

import pytest

from flash_blocks import finding, table
from stepscope.studies.flash.kernels import skipped_tiles
from stepscope.studies.flash.rows import resident_blocks
from study_records import flash_record, tiles_record


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


class TestTiles:
    @pytest.mark.parametrize(
        ("registers", "shared", "warps", "blocks"),
        [
            (168, 98304, 4, 2),  # limited by shared memory
            (255, 1024, 4, 2),  # limited by registers
            (32, 1024, 8, 8),  # limited by threads
            (16, 0, 1, 32),  # the hardware maximum
        ],
    )
    def test_blocks_of_an_h200(self, registers: int, shared: int, warps: int, blocks: int) -> None:
        limits = {"sm_registers": 65536, "sm_shared": 233472, "sm_threads": 2048}
        assert resident_blocks(registers, shared, warps, **limits) == blocks

    def test_the_tile_table_shows_times_spills_and_failures(self) -> None:
        record = tiles_record(
            took={"chosen": 0.3, "16x16": 0.9, "16x128": 0.5},
            spills={"16x128": 12},
            out={"128x128": "does not fit: out of resource: shared memory"},
        )
        rows = table([record], "flash-tiles-forward-d64")
        assert [row["query rows"] for row in rows] == [16, 32, 64, 128]
        assert rows[0]["16 keys"] == pytest.approx(0.9)
        assert rows[0]["128 keys"] == "0.5000 (spills 12)"
        assert (rows[3]["128 keys"], rows[1]["32 keys"]) == ("does not fit", None)
        facts = {row["tile"]: row for row in table([record], "flash-tile-facts")}
        assert facts["16 × 16"]["blocks"] == 2
        assert "shared memory" in facts["128 × 128"]["reason"]

    def test_the_chosen_tile_is_compared_with_its_neighbours(self) -> None:
        took = {"chosen": 0.3, "64x128": 0.31, "64x64": 0.4, "16x16": 0.9}
        out = {"128x64": "does not fit: shared memory", "128x128": "does not fit: registers"}
        records = [tiles_record(took=took, out=out), tiles_record("query")]
        choice = finding(records, "flash.tile-choice")
        assert (choice.values["kernels"], choice.values["beaten"], choice.tone) == (2, 0, "good")
        assert choice.records == tuple(record.id for record in records)
        first, _ = table(records, "flash-tile-choice")
        assert first["chosen"] == "64\u00a0×\u00a0128"
        assert first["time"] == pytest.approx(0.3)
        assert (first["registers"], first["spills"], first["blocks"]) == (168, 0, 2)
        assert (first["twice the keys"], first["half the keys"]) == (None, pytest.approx(0.4))
        assert (first["fastest, ms"], first["slowest, ms"]) == (
            "64\u00a0×\u00a0128,\u00a00.310",
            "16\u00a0×\u00a016,\u00a00.900",
        )
        assert (first["spilling"], first["did not run"]) == (0, 13)

    def test_a_slower_chosen_tile_is_reported(self) -> None:
        took = {"chosen": 0.3, "64x64": 0.2, "64x128": 0.3}
        choice = finding([tiles_record(took=took)], "flash.tile-choice")
        assert (choice.values["beaten"], choice.tone) == (1, "warn")
        assert choice.values["most_lost"] == pytest.approx(0.5)
