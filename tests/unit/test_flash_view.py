"""Report blocks of the flash study: ratios of races, rates and errors of the grid."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import pytest

from flash_blocks import finding, findings, table
from sample_records import merged
from stepscope.records.schema import Quantity, Record
from stepscope.report.blocks import Interval
from stepscope.studies.flash import STUDY
from stepscope.studies.flash.races import PUBLISHED
from study_records import flash_record, matrix_ceiling, race_record
from view_blocks import figures_of, table_of, tables_of


def published(**baselines: Sequence[float]) -> list[Record]:
    """Races at the five published shapes; Stepscope takes 1 ms, the baselines as given."""
    return [
        race_record(
            {"triton": 1.0} | {name: values[index] for name, values in baselines.items()},
            sizes.replace(",", "x"),
        )
        for index, sizes in enumerate(PUBLISHED)
    ]


class TestSpeed:
    def test_ratios_at_each_shape_and_their_mean(self) -> None:
        rows = table(published(sdpa_flash=(1.1, 2.0, 2.0, 2.0, 2.0)), "flash-speed")
        flash = [row for row in rows if row["compared with"] == "sdpa_flash"]
        assert [row["speedup"].value for row in flash] == pytest.approx(
            [1.1, 2.0, 2.0, 2.0, 2.0, (1.1 * 16) ** 0.2]
        )
        assert (flash[1]["Stepscope"], flash[1]["baseline"]) == (
            pytest.approx(1.0),
            pytest.approx(2.0),
        )
        measured = flash[0]["speedup"]
        assert isinstance(measured, Interval)
        assert measured.low < 1.1 < measured.high

    @pytest.mark.parametrize(
        ("times", "tone"),
        [((1.1, 2.0, 2.0, 2.0, 2.0), "good"), ((1.0,) * 5, "info"), ((0.87,) * 5, "warn")],
    )
    def test_the_interval_of_the_mean_decides_the_tone(
        self, times: tuple[float, ...], tone: str
    ) -> None:
        records = published(sdpa_cudnn=times)
        match = finding(records, "flash.against-baseline")
        assert match.values["mean"] == pytest.approx(math.prod(times) ** 0.2)
        assert (match.values["lowest"], match.values["missing"]) == (pytest.approx(min(times)), 0)
        assert match.records == tuple(record.id for record in records)
        assert match.tone == tone

    def test_a_mean_over_some_of_the_shapes_is_not_good(self) -> None:
        match = finding(published(sdpa_flash=(2.0,) * 5)[:3], "flash.against-baseline")
        assert (match.values["missing"], match.tone) == (2, "info")

    def test_the_shape_of_the_leaderboard(self) -> None:
        match = finding([race_record({"triton": 4.6, "auto": 4.6})], "flash.leaderboard-shape")
        assert match.values["ms"] == pytest.approx(4.6)

    def test_float32_is_compared_with_the_efficient_backend(self) -> None:
        races = [
            race_record({"triton": 1.0, "sdpa_efficient": 1.25}, "1x16x4096x64:float32"),
            race_record({"triton": 1.0, "sdpa_efficient": 9.0}, "1x16x4096x64"),
        ]
        (row,) = table(races, "flash-speed")
        assert (row["compared with"], row["shape"]) == ("sdpa_efficient", "1,16,4096,64 fp32")
        assert row["speedup"].value == pytest.approx(1.25)

    def test_the_caption_says_how_a_sample_starts(self) -> None:
        def caption(records: Sequence[Record]) -> str:
            return table_of(STUDY.view(records), "flash-speed").caption

        ahead = published(flex=(2.0,) * 5)
        assert "with the CPU ahead" in caption(ahead)
        config = {k: v for k, v in ahead[0].config.items() if k != "host_ahead"}
        early = msgspec.structs.replace(ahead[0], config=config)
        assert "from an idle GPU" in caption([early, *ahead[1:]])

    def test_the_headline_is_the_speed_table_else_the_comparison(self) -> None:
        ours = STUDY.headline(published(flex=(2.0,) * 5))
        assert ours is not None
        assert ours.title.startswith("Stepscope's attention compared")
        cpu = STUDY.headline([race_record({"sdpa": 1.0, "tiled": 3.0}, "1x2x64x64:float32")])
        assert cpu is not None
        assert cpu.rows[0][:3] == ("1,2,64,64", "float32", "single")
        assert cpu.rows[0][3:] == pytest.approx((1.0, 3.0))
        many = STUDY.headline([flash_record(shape="4x16x4096x64"), flash_record()])
        assert many is not None
        assert [row[0] for row in many.rows] == ["4,16,4096,64"]
        assert STUDY.headline([flash_record()]) is None

    def test_excluded_implementations_are_shown_and_failures_reported(self) -> None:
        out = {"flex": "refused: on cpu", "tiled": "failed: RuntimeError: no"}
        records = [race_record({"triton": 1.0}, out=out)]
        (row,) = table(records, "flash-race")
        assert (row["flex"], row["tiled"]) == ("refused", "failed")
        match = finding(records, "flash.racer-failed")
        assert (match.values["racer"], match.values["shape"]) == ("tiled", "1,16,16384,64")
        assert match.tone == "warn"

    def test_a_failed_comparison_has_a_row(self) -> None:
        (row,) = table([race_record({"triton": 1.0}, status="oom", reason="out")], "flash-race")
        assert (row["batch,heads,length,d"], row["calls"]) == ("1,16,16384,64", "OOM")
        assert row["triton"] is None


class TestGrid:
    def test_rates_count_a_causal_mask_as_half(self) -> None:
        (row,) = table([flash_record(seq=4096, head=64, both=1.0)], "flash-times")
        forward = 4 * 4096**2 * 64 / 2
        assert row["both rate"] == pytest.approx(3.5 * forward / 1e-3)
        assert row["forward rate"] == pytest.approx(forward / (1e-3 / 3))
        assert row["of the ceiling"] == pytest.approx(3.5 * forward / 1e-3 / 700e12)
        assert row["issued in"] == pytest.approx(0.2)

    def test_a_failed_cell_has_a_row_with_its_reason(self) -> None:
        (row,) = table([flash_record(status="oom", reason="too large")], "flash-times")
        assert (row["forward"], row["reason"]) == ("OOM", "too large")

    def test_rate_figures_by_d_and_dtype_show_the_ceiling(self) -> None:
        records = [
            flash_record(name, seq=seq, head=head, dtype=dtype, peak=seq * 1000.0)
            for name in ("triton", "sdpa_efficient")
            for seq in (512, 1024)
            for head in (64, 128)
            for dtype in ("bfloat16", "float32")
        ]
        drawn = figures_of(STUDY.view(records))
        assert set(drawn) == {
            *(f"flash-rate-{dtype}-d{d}" for dtype in ("bfloat16", "float32") for d in (64, 128)),
            "flash-memory-bfloat16",
            "flash-memory-float32",
        }
        figure = drawn["flash-rate-bfloat16-d64"]
        assert [curve.label for curve in figure.curves] == ["triton", "sdpa_efficient"]
        scale = 1e12 if figure.y_label.endswith("TFLOP/s") else 1e9
        assert figure.marks[0].value * scale == pytest.approx(700e12)

    @pytest.mark.parametrize(
        ("dtype", "error", "missed"),
        [("bfloat16", 0.9, ""), ("bfloat16", 1.2, "output"), ("bfloat16", 1.6, "output/dq/dk/dv"),
         ("float32", 1.9, ""), ("float32", 2.5, "output/dq/dk/dv")],
    )  # fmt: skip
    def test_our_errors_are_compared_with_the_policy(
        self, dtype: str, error: float, missed: str
    ) -> None:
        match = finding([flash_record(dtype=dtype, error=error)], "flash.accuracy")
        assert match.values["ratio"] == pytest.approx(error)
        assert (match.values["missed"], match.values["tensors"]) == (int(bool(missed)), missed)
        assert match.tone == ("warn" if missed else "good")

    def test_errors_of_others_are_reported_only_beyond_the_policy(self) -> None:
        records = [flash_record("flex", error=2.0), flash_record("sdpa_flash", error=0.5)]
        match = finding(records, "flash.accuracy")
        assert (match.values["attention"], match.tone) == ("flex", "info")

    def test_other_kernels_than_ours_are_reported(self) -> None:
        ran = {"forward": "forward_kernel", "backward": "query_kernel"}
        other = ran | {"backward": "void pytorch_flash::flash_bwd_kernel<int>"}
        saw = flash_record(attachments={"kernels": ran})
        assert finding([saw], "flash.own-kernels").records == (saw.id,)
        fallen = [saw, flash_record(seq=512, attachments={"kernels": other})]
        assert not findings(fallen, "flash.own-kernels")

    def test_saved_bytes_are_compared_with_the_prediction(self) -> None:
        def saving(extra: float, name: str) -> Record:
            record = flash_record(name)
            predicted = record.quantity("predicted_saved_bytes") or 0.0
            saved = (Quantity(name="saved_bytes", value=predicted + extra, unit="B"),)
            return msgspec.structs.replace(record, quantities=merged(record.quantities, saved))

        exact = [saving(0.0, "triton"), saving(0.0, "flex")]
        match = finding(exact, "flash.saved")
        assert (match.values["equal"], match.values["cells"], match.tone) == (2, 2, "good")
        match = finding([*exact, saving(1024.0, "sdpa_flash")], "flash.saved")
        assert (match.values["equal"], match.values["cells"], match.tone) == (2, 3, "info")
        assert match.values["off_bytes"] == 1024
        assert match.values["cell"] == "sdpa_flash 1,1,4096,64 bfloat16"

    def test_the_exponent_of_memory_growth(self) -> None:
        records = [
            flash_record(name, seq=seq, peak=float(seq) ** power)
            for name, power in (("triton", 1.0), ("reference", 2.0))
            for seq in (1024, 2048, 4096)
        ]
        match = finding(records, "flash.memory-growth")
        assert match.values["triton"] == pytest.approx(1.0)
        assert match.values["reference"] == pytest.approx(2.0)
        assert set(match.records) == {record.id for record in records}

    def test_the_overview_marks_host_bound_cells(self) -> None:
        records = [
            flash_record(seq=512, both=1.0, issued=0.6),
            flash_record(seq=4096, both=1.0, issued=0.4),
            flash_record("flex", seq=4096, both=0.5),
            flash_record(shape="4x16x4096x64", both=10.0),
        ]
        short, long = table(records, "flash-lengths-bfloat16-d64")
        # 3.5 times the FLOPs of the forward, relative to 700 TFLOP/s.
        assert short["triton"] == "1.00\u00a0·\u00a00.12\u00a0·\u00a0<0.1\u00a0%*"
        assert long["triton"] == "1.00\u00a0·\u00a07.5\u00a0·\u00a01.1\u00a0%"
        assert (short["flex"], long["flex"].split("\u00a0")[0]) == (None, "0.500")
        (many,) = table(records, "flash-shapes")
        assert many["batch,heads,length,d"] == "4,16,4096,64"
        match = finding(records, "flash.host-bound")
        assert (match.values["cells"], match.values["of"]) == (1, 4)
        assert match.values["free_from_length"] == 4096
        assert match.values["issue_ms_low"] == match.values["issue_ms_high"] == pytest.approx(0.6)

    def test_a_figure_leaves_out_lengths_that_are_host_bound_for_all(self) -> None:
        records = [
            flash_record(name, seq=seq, both=1.0, issued=0.9 if seq < at else 0.1)
            for name, at in (("triton", 4096), ("flex", 2048))
            for seq in (512, 1024, 2048, 4096)
        ]
        drawn, *_ = figures_of(STUDY.view(records)).values()
        assert {curve.x for curve in drawn.curves} == {(2048.0, 4096.0)}
        assert "Shorter lengths are left out" in drawn.caption

    def test_every_error_that_exceeds_the_policy_is_listed(self) -> None:
        records = [flash_record("flex", dtype="float32", error=2.5), flash_record(error=0.5)]
        by_name = {row["attention"]: row for row in table(records, "flash-errors")}
        assert by_name["flex"]["shapes within the policy"] == "0\u00a0of\u00a01"
        assert by_name["triton"]["dQ"] == pytest.approx(0.5)
        assert by_name["triton"]["shapes within the policy"] == "1\u00a0of\u00a01"
        missed = table(records, "flash-error-misses")
        assert [row["tensor"] for row in missed] == ["output", "dQ", "dK", "dV"]
        assert missed[0]["error"] == pytest.approx(2.5e-3)
        assert missed[0]["allowed"] == pytest.approx(2e-3 + 1e-5)
        names = list(tables_of(STUDY.view(records[1:])))
        assert "flash-errors" in names
        assert "flash-error-misses" not in names

    def test_split_float32_matmuls_have_their_own_limit(self) -> None:
        ran = {"kernels": {"forward": "split_kernel; forward_kernel"}}
        limits = (matrix_ceiling("float32", 50e12), matrix_ceiling("bfloat16", 600e12))
        records = [
            flash_record(dtype="float32", seq=seq, both=both, attachments=ran, ceilings=limits)
            for seq, both in ((4096, 0.125), (8192, 0.5))
        ]
        match = finding(records, "flash.highest-rate").values
        assert match["limit"] == "six bfloat16 matmuls"
        assert match["limit_rate"] == pytest.approx(100e12)
        drawn, *_ = figures_of(STUDY.view(records)).values()
        assert [mark.value for mark in drawn.marks] == pytest.approx([50.0, 100.0])

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
            "forward_kernel",
            "query_kernel",
            2,
        )
        assert reference["forward"] == "none: matmuls and a softmax"


RAN = {"forward": "forward_kernel", "backward": "query_kernel"}
GPU_AND_CPU_BOUND = [
    flash_record(both=1.0),
    flash_record("flex", both=0.8),
    flash_record(seq=512, both=0.05, issued=0.04),
    flash_record("flex", seq=512, both=0.1, issued=0.08),
]
SENTENCES = {
    "flash.against-baseline": (
        published(sdpa_flash=(2.0,) * 5)[:3],
        "Compared with sdpa_flash in bfloat16, Stepscope is 2.00 times as fast (geometric mean of 3"
        " of 5 shapes; lowest 2.00 at 1,16,16384,64).",
    ),
    "flash.leaderboard-shape": (
        [race_record({"triton": 4.6})],
        "1,16,16384,64 takes 4.60 ms forward and backward.",
    ),
    "flash.highest-rate": (
        [flash_record(both=1.0), flash_record("flex", both=0.8)],
        "The highest rate in bfloat16 is 9.40 TFLOP/s forward and backward, flex at 1,1,4096,64,"
        " 1.3 % of the 700 TFLOP/s that matmuls alone reach here; Stepscope reaches 7.52 TFLOP/s at"
        " 1,1,4096,64.",
    ),
    "flash.host-bound": (
        GPU_AND_CPU_BOUND,
        "2 of 4 cells are CPU-bound (issuing the launches takes more than half of the time); their"
        " rates are not those of the kernels (* in the tables). With one head, every cell below"
        " length 4096 is CPU-bound. In these cells issuing a forward and backward pass of triton"
        " takes 40.0 µs to 40.0 µs.",
    ),
    "flash.memory-growth": (
        [flash_record(seq=seq, peak=1000.0 * seq) for seq in (1024, 2048, 4096)],
        "Peak memory grows as a power of the length; exponents over the three longest in bfloat16"
        " at d 64: triton 1.0 (3.91 MiB at 4096).",
    ),
    "flash.accuracy": (
        [flash_record(error=1.2)],
        "The error of triton is at most 1.20 times that of the reference in the same dtype, over 1"
        " shape (1,1,4096,64 bfloat16). It exceeds the policy of Stepscope at 1: 1,1,4096,64"
        " bfloat16 output.",
    ),
    "flash.own-kernels": (
        [flash_record(attachments={"kernels": RAN})],
        "In all 1 records of triton the profiler saw Stepscope's kernels for forward and backward,"
        " and no other attention kernel.",
    ),
    "flash.without-result": (
        [flash_record(), flash_record(seq=8192, status="oom", reason="too large")],
        "1 of 2 cases ran out of memory: triton_b1_h1_s8192_d64_bfloat16_causal. First reason: too"
        " large",
    ),
}


@pytest.mark.parametrize("code", SENTENCES)
def test_wording(code: str) -> None:
    records, sentence = SENTENCES[code]
    assert finding(records, code).sentence == sentence


def test_wording_of_saved_bytes() -> None:
    record = flash_record(attachments={"kernels": RAN | {"forward": "flash_fwd_kernel"}})
    predicted = record.quantity("predicted_saved_bytes") or 0.0
    saved = (Quantity(name="saved_bytes", value=predicted + 1024, unit="B"),)
    records = [msgspec.structs.replace(record, quantities=merged(record.quantities, saved))]
    assert finding(records, "flash.saved").sentence == (
        "The bytes saved for backward match the prediction from the shapes exactly in 0 of 1 cells;"
        " cells of triton differ by at most 1.00 KiB (triton 1,1,4096,64 bfloat16)."
    )
