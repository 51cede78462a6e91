"""What the flash study says of its races and its grid: ratios, goals, rates, errors."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from flash_blocks import sentences, table
from sample_records import merged
from stepscope.records.schema import Quantity, Record
from stepscope.report.blocks import Figure, Interval, Table
from stepscope.studies.flash import STUDY
from stepscope.studies.flash.goals import GOALS, PUBLISHED
from study_records import flash_record, matrix_ceiling, race_record


def published(**peers: Sequence[float]) -> list[Record]:
    """Races at the five shapes, each of ours 1 ms, each peer as given."""
    return [
        race_record(
            {"triton": 1.0} | {name: values[place] for name, values in peers.items()},
            sizes.replace(",", "x"),
        )
        for place, sizes in enumerate(PUBLISHED)
    ]


class TestSpeed:
    def test_ratios_and_their_mean_stand_beside_the_goal(self) -> None:
        rows = table(published(sdpa_flash=(1.1, 2.0, 2.0, 2.0, 2.0)), "flash-speed")
        flash = [row for row in rows if row["against"] == "sdpa_flash"]
        assert [row["measured"].value for row in flash] == pytest.approx(
            [1.1, 2.0, 2.0, 2.0, 2.0, (1.1 * 16) ** 0.2]
        )
        assert [row["outcome"] for row in flash] == ["below", *["reached"] * 5]
        assert (flash[0]["goal"], flash[-1]["goal"]) == ("≥ 1.2×", "≥ 1.4×")
        assert (flash[1]["ours"], flash[1]["peer"]) == (pytest.approx(1.0), pytest.approx(2.0))
        held = flash[0]["measured"]
        assert isinstance(held, Interval)
        assert held.low < 1.1 < held.high

    @pytest.mark.parametrize(
        ("peer", "times", "reached"),
        [
            ("sdpa_flash", (1.5, 1.5, 1.5, 1.5, 1.5), True),
            ("sdpa_flash", (1.3, 1.3, 1.3, 1.3, 1.3), False),
            ("sdpa_flash", (1.1, 2.0, 2.0, 2.0, 2.0), False),
            ("flex", (1.16,) * 5, True),
            ("flex", (2.0, 2.0, 2.0, 2.0, 1.14), False),
            ("sdpa_cudnn", (0.7, 0.95, 0.95, 0.95, 0.95), True),
            ("sdpa_cudnn", (0.87,) * 5, False),
        ],
    )
    def test_a_goal_is_reached_or_plainly_not(
        self, peer: str, times: tuple[float, ...], reached: bool
    ) -> None:
        (told,) = sentences(published(**{peer: times}), f"Against {peer}")
        assert ("is not reached" not in told.text) == reached
        assert told.tone == ("good" if reached else "warn")

    def test_a_mean_over_some_of_the_shapes_is_not_good(self) -> None:
        (told,) = sentences(published(sdpa_flash=(2.0,) * 5)[:3], "Against sdpa_flash")
        assert "2 shapes were not" in told.text
        assert told.tone == "warn"

    @pytest.mark.parametrize(("ours", "outcome"), [(4.6, "reached"), (4.8, "missed")])
    def test_the_one_shape_with_a_time_to_reach(self, ours: float, outcome: str) -> None:
        records = [race_record({"triton": ours, "auto": ours})]
        assert table(records, "flash-speed")[-1]["outcome"] == outcome
        assert sentences(records, f"4.7 ms is {outcome}")

    def test_float32_is_held_against_the_efficient_backend(self) -> None:
        goal = next(goal for goal in GOALS if goal.dtype == "float32")
        races = [
            race_record({"triton": 1.0, "sdpa_efficient": 1.25}, "1x16x4096x64:float32"),
            race_record({"triton": 1.0, "sdpa_efficient": 9.0}, "1x16x4096x64"),
        ]
        (row,) = table(races, "flash-speed")
        assert (row["against"], row["shape"]) == (goal.peer, "1,16,4096,64 fp32")
        assert (row["measured"].value, row["outcome"]) == (pytest.approx(1.25), "below")

    def test_short_lengths_count_with_the_host_inside(self) -> None:
        races = [
            race_record(
                {"triton": 0.01, "sdpa": 0.02, "auto": 0.01}, f"1x1x{seq}x64",
                in_a_row={"triton": 0.2, "sdpa": wall, "auto": 0.1},
            )
            for seq, wall in ((128, 0.1), (256, 0.3))
        ]  # fmt: skip
        ours, auto = table(races, "flash-speed")
        assert "1,1,128,64" in ours["shape"]
        assert (ours["measured"].value, ours["outcome"]) == (pytest.approx(0.5), "slower")
        assert auto["outcome"] == "reached"
        assert sentences(races, "slower than torch's own call at 1 of them")

    @pytest.mark.parametrize(
        ("spread", "outcome"), [(0.0, "slower"), (0.3, "not shown slower")], ids=("clear", "wide")
    )
    def test_a_ratio_below_one_is_not_called_reached(self, spread: float, outcome: str) -> None:
        took = {"triton": 0.2, "sdpa": 0.19}
        made = race_record(took, "1x1x128x64", in_a_row=took)
        held = [
            msgspec.structs.replace(
                series, values=tuple(0.19 * (1 + spread * (-1) ** at) for at in range(20))
            )
            if (series.name, series.variant) == ("wall", "sdpa")
            else series
            for series in made.series
        ]
        races = [msgspec.structs.replace(made, series=tuple(held))]
        (row,) = table(races, "flash-speed")
        assert row["measured"].value < 1.0
        assert row["outcome"] == outcome

    def test_the_caption_says_how_a_sample_began(self) -> None:
        def caption(records: Sequence[Record]) -> str:
            held = (b for b in STUDY.view(records) if isinstance(b, Table))
            return next(b.caption for b in held if b.name == "flash-speed")

        ahead = published(flex=(2.0,) * 5)
        assert "with the host ahead" in caption(ahead)
        config = {k: v for k, v in ahead[0].config.items() if k != "host_ahead"}
        early = msgspec.structs.replace(ahead[0], config=config)
        assert "from an idle device" in caption([early, *ahead[1:]])

    def test_the_headline_is_the_speed_table_else_the_race(self) -> None:
        ours = STUDY.headline(published(flex=(2.0,) * 5))
        assert ours is not None
        assert ours.title.startswith("Speed against peers")
        cpu = STUDY.headline([race_record({"sdpa": 1.0, "tiled": 3.0}, "1x2x64x64:float32")])
        assert cpu is not None
        assert cpu.rows[0][:3] == ("1,2,64,64", "float32", "alone")
        assert cpu.rows[0][3:] == pytest.approx((1.0, 3.0))
        many = STUDY.headline([flash_record(shape="4x16x4096x64"), flash_record()])
        assert many is not None
        assert [row[0] for row in many.rows] == ["4,16,4096,64"]
        assert STUDY.headline([flash_record()]) is None

    def test_who_did_not_run_is_in_the_table_and_a_failure_is_told(self) -> None:
        out = {"flex": "refused: on cpu", "tiled": "failed: RuntimeError: no"}
        records = [race_record({"triton": 1.0}, out=out)]
        (row,) = table(records, "flash-race")
        assert (row["flex"], row["tiled"]) == ("refused", "failed")
        assert not sentences(records, "on cpu")
        assert sentences(records, "tiled at 1,16,16384,64 bfloat16 failed: RuntimeError: no")


class TestGrid:
    def test_rates_count_a_causal_mask_as_half(self) -> None:
        (row,) = table([flash_record(seq=4096, head=64, both=1.0)], "flash-times")
        forward = 4 * 4096**2 * 64 / 2
        assert row["both rate"] == pytest.approx(3.5 * forward / 1e-3)
        assert row["forward rate"] == pytest.approx(forward / (1e-3 / 3))
        assert row["of the limit"] == pytest.approx(3.5 * forward / 1e-3 / 700e12)
        assert row["host"] == pytest.approx(0.2)

    def test_a_cell_that_failed_keeps_its_row_and_reason(self) -> None:
        (row,) = table([flash_record(status="oom", reason="too large")], "flash-times")
        assert (row["forward"], row["otherwise"]) == ("OOM", "too large")

    def test_the_rate_is_drawn_with_the_ceiling_for_each_d_and_format(self) -> None:
        records = [
            flash_record(name, seq=seq, head=head, dtype=dtype, peak=seq * 1000.0)
            for name in ("triton", "sdpa_efficient")
            for seq in (512, 1024)
            for head in (64, 128)
            for dtype in ("bfloat16", "float32")
        ]
        drawn = {b.name: b for b in STUDY.view(records) if isinstance(b, Figure)}
        assert set(drawn) == {
            *(f"flash-rate-{form}-d{d}" for form in ("bfloat16", "float32") for d in (64, 128)),
            "flash-memory-bfloat16", "flash-memory-float32",
        }  # fmt: skip
        figure = drawn["flash-rate-bfloat16-d64"]
        assert [curve.label for curve in figure.curves] == ["triton", "sdpa_efficient"]
        scale = 1e12 if figure.y_label.endswith("TFLOP/s") else 1e9
        assert figure.marks[0].value * scale == pytest.approx(700e12)

    def test_a_16_bit_format_that_is_slower_is_told(self) -> None:
        good = [flash_record(dtype="bfloat16", both=1.0), flash_record(dtype="float32", both=4.0)]
        assert sentences(good, "slower nowhere")[0].tone == "good"
        bad = [flash_record(dtype="bfloat16", both=5.0), flash_record(dtype="float32", both=4.0)]
        assert sentences(bad, "slower at bfloat16 1,1,4096,64")[0].tone == "warn"

    @pytest.mark.parametrize(
        ("dtype", "error", "missed"),
        [("bfloat16", 0.9, ""), ("bfloat16", 1.2, "output."), ("bfloat16", 1.6, "output/dq/dk/dv"),
         ("float32", 1.9, ""), ("float32", 2.5, "output/dq/dk/dv")],
    )  # fmt: skip
    def test_our_errors_are_held_to_the_policy(self, dtype: str, error: float, missed: str) -> None:
        (told,) = sentences([flash_record(dtype=dtype, error=error)], "triton errs by at most")
        assert (told.tone == "warn") == bool(missed)
        assert missed in told.text

    def test_the_proof_of_our_kernels_and_its_absence(self) -> None:
        ran = {"forward": "forward_kernel", "backward": "query_kernel"}
        other = ran | {"backward": "void pytorch_flash::flash_bwd_kernel<int>"}
        proof = "the profiler saw our kernels"
        saw = flash_record(attachments={"kernels": ran})
        assert sentences([saw], f"In all 1 records of triton {proof}")
        fallen = [saw, flash_record(seq=512, attachments={"kernels": other})]
        assert not sentences(fallen, proof)
        assert sentences(fallen, "Lint other-kernel, 1×, first: triton ran kernels of sdpa_flash")

    def test_what_a_forward_saves_is_held_against_the_prediction(self) -> None:
        def saving(extra: float, name: str) -> Record:
            made = flash_record(name)
            predicted = made.quantity("predicted_saved_bytes") or 0.0
            held = (Quantity(name="saved_bytes", value=predicted + extra, unit="B"),)
            return msgspec.structs.replace(made, quantities=merged(made.quantities, held))

        exact = [saving(0.0, "triton"), saving(0.0, "flex")]
        (told,) = sentences(exact, "in 2 of 2 cells.")
        assert told.tone == "good"
        (told,) = sentences([*exact, saving(1024.0, "sdpa_flash")], "in 2 of 3 cells")
        assert "off are sdpa_flash, at most by 1.00 KiB (sdpa_flash 1,1,4096,64" in told.text

    def test_memory_grows_by_its_power(self) -> None:
        records = [
            flash_record(name, seq=seq, peak=float(seq) ** power)
            for name, power in (("triton", 1.0), ("reference", 2.0))
            for seq in (1024, 2048, 4096)
        ]
        (told,) = sentences(records, "Peak memory grows")
        assert "triton 1.0 (" in told.text
        assert "reference 2.0 (" in told.text

    def test_cells_at_a_glance_say_where_the_host_decides(self) -> None:
        records = [
            flash_record(seq=512, both=1.0, issued=0.6),
            flash_record(seq=4096, both=1.0, issued=0.4),
            flash_record("flex", seq=4096, both=0.5),
            flash_record(shape="4x16x4096x64", both=10.0),
        ]
        short, long = table(records, "flash-lengths-bfloat16-d64")
        # 3.5 times the forward's products, of 700 TFLOP/s.
        assert short["triton"] == "1.00\u00a0·\u00a00.12\u00a0·\u00a0<0.1\u00a0%*"
        assert long["triton"] == "1.00\u00a0·\u00a07.5\u00a0·\u00a01.1\u00a0%"
        assert (short["flex"], long["flex"].split("\u00a0")[0]) == (None, "0.500")
        (many,) = table(records, "flash-shapes")
        assert many["batch,heads,length,d"] == "4,16,4096,64"
        (told,) = sentences(records, "In 1 of 4 cells the host issued for more than half")
        assert "no cell below length 4096" in told.text
        assert "it took 600 µs to 600 µs" in told.text

    def test_a_figure_leaves_out_lengths_at_which_the_host_decides_for_all(self) -> None:
        records = [
            flash_record(name, seq=seq, both=1.0, issued=0.9 if seq < at else 0.1)
            for name, at in (("triton", 4096), ("flex", 2048))
            for seq in (512, 1024, 2048, 4096)
        ]
        drawn = next(b for b in STUDY.view(records) if isinstance(b, Figure))
        assert {curve.x for curve in drawn.curves} == {(2048.0, 4096.0)}
        assert "Shorter lengths are left out" in drawn.caption

    def test_ours_against_the_fastest_other_by_who_decides(self) -> None:
        records = [
            flash_record(seq=4096, both=1.0), flash_record("flex", seq=4096, both=0.8),
            flash_record("sdpa_flash", seq=4096, both=2.0),
            flash_record(seq=8192, both=1.0), flash_record("flex", seq=8192, both=1.5),
            flash_record(seq=512, both=1.0), flash_record("flex", seq=512, both=0.5, issued=0.4),
        ]  # fmt: skip
        rows = table(records, "flash-fastest-peer")
        assert [(row["fastest other"], row["decided by"]) for row in rows] == [
            ("flex", "host"), ("flex", "device"), ("flex", "device"),
        ]  # fmt: skip
        assert [row["ratio"] for row in rows] == pytest.approx([0.5, 0.8, 1.5])
        (told,) = sentences(records, "where kernels decide, ours is faster at 1 of 2")
        assert "behind at 1 (0.800 of flex at 1,1,4096,64 bfloat16)" in told.text
        assert "At the other 1 the host decides, and ours is behind at 1." in told.text

    def test_every_error_beyond_the_policy_is_listed(self) -> None:
        records = [flash_record("flex", dtype="float32", error=2.5), flash_record(error=0.5)]
        by_name = {row["attention"]: row for row in table(records, "flash-errors")}
        assert by_name["flex"]["shapes within the policy"] == "0\u00a0of\u00a01"
        assert by_name["triton"]["dQ"] == pytest.approx(0.5)
        assert by_name["triton"]["shapes within the policy"] == "1\u00a0of\u00a01"
        missed = table(records, "flash-error-misses")
        assert [row["tensor"] for row in missed] == ["output", "dQ", "dK", "dV"]
        assert missed[0]["error"] == pytest.approx(2.5e-3)
        assert missed[0]["allowed"] == pytest.approx(2e-3 + 1e-5)
        held = [b.name for b in STUDY.view(records[1:]) if isinstance(b, Table)]
        assert "flash-errors" in held
        assert "flash-error-misses" not in held

    def test_products_in_planes_have_a_limit_of_their_own(self) -> None:
        ran = {"kernels": {"forward": "split_kernel; forward_kernel"}}
        limits = (matrix_ceiling("float32", 50e12), matrix_ceiling("bfloat16", 600e12))
        records = [
            flash_record(dtype="float32", seq=seq, both=both, attachments=ran, ceilings=limits)
            for seq, both in ((4096, 0.125), (8192, 0.5))
        ]
        (told,) = sentences(records, "The highest rate in float32")
        assert told.text.endswith("as six products of bfloat16, whose limit is 100 TFLOP/s.")
        assert not sentences(records, "above-ceiling")
        drawn = next(b for b in STUDY.view(records) if isinstance(b, Figure))
        assert [mark.value for mark in drawn.marks] == pytest.approx([50.0, 100.0])
        plain = [flash_record(dtype="float32", both=0.125, ceilings=limits)]
        assert sentences(plain, "Lint above-ceiling")

    def test_kernels_are_counted_by_name(self) -> None:
        ran = {"forward": "forward_kernel", "backward": "query_kernel"}
        loose = {"forward": "nvjet_a; nvjet_b", "backward": "nvjet_a"}
        records = [
            *(flash_record(seq=seq, attachments={"kernels": ran}) for seq in (512, 1024)),
            flash_record("reference", attachments={"kernels": loose}),
        ]
        ours, reference = sorted(
            table(records, "flash-kernels"), key=lambda row: row["attention"], reverse=True
        )
        assert (ours["forward"], ours["backward"], ours["cells"]) == (
            "forward_kernel", "query_kernel", 2,
        )  # fmt: skip
        assert reference["forward"] == "none: products and a softmax"
