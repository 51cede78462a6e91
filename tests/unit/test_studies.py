"""Every study: its presets, and its view of whatever records there are."""

from __future__ import annotations

import pytest

from lever_records import card_record, lever_record
from own_records import inspected_record, own_record, trial_record
from parallel_records import collective_record, ddp_record, fsdp_record, sharding_record
from precision_records import autocast_record, dot_record, square_record, sum_record
from rehearsal_records import check_record, recorded_record
from sample_records import environment
from step_records import (
    compile_record,
    loss_record,
    rung_record,
    step_race_record,
    waterfall_record,
)
from stepscope.errors import StepscopeError, UsageError
from stepscope.records.schema import Record
from stepscope.report.blocks import Figure, Table
from stepscope.report.html import html_page
from stepscope.report.text import markdown_page
from stepscope.studies.page import make_page
from stepscope.studies.presets import PRESETS, preset_cases
from stepscope.studies.registry import all_studies, find_study
from study_records import (
    attention_record,
    benchmark_record,
    checkpointing_record,
    flash_record,
    memory_record,
    profile_record,
    race_record,
    tiles_record,
    warmup_record,
)

ON_CPU = environment(device_kind="cpu", device_name="Xeon", driver=None, power_limit_w=None)
ON_GPU = environment()
FAILURES = {
    "oom": "OutOfMemoryError: CUDA out of memory",
    "error": "RuntimeError: <b>no</b>",
    "timeout": "not done after 600 s (--timeout)",
    "skipped": "TF32 exists on NVIDIA GPUs from Ampere on",
}
NEED_A_STEP = {"own", "inspect", "advise"}
"""Studies of a step that only its author can bring."""
COLD = [300.0, 150.0, *[100.0] * 10]


def mixed_records() -> dict[str, list[Record]]:
    modes = ("forward", "forward-backward", "train-step")
    sound = [
        benchmark_record(mode, context=context, dtype=dtype, phases={"forward": 30.0})
        for mode in modes
        for context in (128, 512)
        for dtype in ("float32", "bfloat16")
    ]
    lost = [
        benchmark_record(mode, size=size, status=status, reason=FAILURES[status])
        for size, status in zip(("medium", "large", "xl", "2.7b"), FAILURES, strict=True)
        for mode in modes
    ]
    half = benchmark_record("forward", size="tiny")
    half_lost = benchmark_record(size="tiny", status="oom", reason=FAILURES["oom"])
    return {
        "allreduce": [
            *(collective_record(ranks=ranks) for ranks in (1, 2, 4)),
            collective_record("broadcast", wrong=1),
            *(
                collective_record(ranks=ranks, status=status, reason=FAILURES[status])
                for ranks, status in enumerate(FAILURES, start=5)
            ),
        ],
        "ddp": [
            *(ddp_record(ranks=ranks) for ranks in (1, 2)),
            *(
                ddp_record(context=64 * place, status=status, reason=FAILURES[status])
                for place, status in enumerate(FAILURES, start=1)
            ),
        ],
        "sharding": [
            *(sharding_record(ranks=ranks) for ranks in (1, 2, 4)),
            *(
                sharding_record(context=64 * place, status=status, reason=FAILURES[status])
                for place, status in enumerate(FAILURES, start=3)
            ),
        ],
        "fsdp": [
            *(fsdp_record(ranks=ranks) for ranks in (1, 2, 4)),
            *(
                fsdp_record(context=64 * place, status=status, reason=FAILURES[status])
                for place, status in enumerate(FAILURES, start=3)
            ),
        ],
        "rehearsal": [
            recorded_record(),
            recorded_record(context=256),
            check_record(),
            *(
                recorded_record(context=64 * place, status=status, reason=FAILURES[status])
                for place, status in enumerate(FAILURES, start=5)
            ),
            check_record(ranks=4, status="error", reason=FAILURES["error"]),
        ],
        "benchmark": [*sound, *lost, half, half_lost],
        "attention": [
            *(
                attention_record(mode, seq=seq, head=head, step=seq / 10)
                for mode in ("forward", "backward")
                for seq in (256, 1024, 4096)
                for head in (16, 64)
            ),
            *(
                attention_record(seq=16384, head=head, status=status, reason=FAILURES[status])
                for head, status in zip((16, 32, 64, 128), FAILURES, strict=True)
            ),
        ],
        "flash": flash_records(),
        "levers": [
            card_record(),
            lever_record(),
            lever_record("recomputation", kept=(4e9, 1e9)),
            *(
                lever_record(lever, status=status, reason=FAILURES[status])
                for lever, status in zip(
                    ("divergence", "precision", "fusion", "tiling"), FAILURES, strict=True
                )
            ),
        ],
        "accumulation": [
            sum_record(),
            sum_record("float32", "float32", total=100.0, moved=10_000),
            dot_record(),
            square_record(),
            sum_record("bfloat16", "bfloat16", status="oom", reason=FAILURES["oom"]),
            dot_record("tf32", status="skipped", reason=FAILURES["skipped"]),
            square_record("float32", status="error", reason=FAILURES["error"]),
            square_record("bfloat16", status="timeout", reason=FAILURES["timeout"]),
        ],
        "autocast": [
            autocast_record(),
            autocast_record("tiny", "bfloat16"),
            *(
                autocast_record(size, status=status, reason=FAILURES[status])
                for size, status in zip(("mini", "small", "large", "xl"), FAILURES, strict=True)
            ),
        ],
        "checkpointing": [
            *(
                checkpointing_record(strategy, peak=peak << 20, step=step)
                for strategy, peak, step in (
                    ("no", 900, 10.0),
                    ("1", 300, 13.0),
                    ("nested", 290, 18.0),
                )
            ),
            checkpointing_record("1", peak=300 << 20, budget_gib=0.5),
            *(
                checkpointing_record(str(2**place), status=status, reason=FAILURES[status])
                for place, status in enumerate(FAILURES, start=1)
            ),
        ],
        "memory": [
            *(
                memory_record(mode, context=context, dtype=dtype, attention=attention)
                for mode in ("forward", "train-step")
                for context in (128, 512)
                for dtype in ("float32", "bfloat16")
                for attention in ("reference", "sdpa")
            ),
            *(
                memory_record(context=64 * place, status=status, reason=FAILURES[status])
                for place, status in enumerate(FAILURES, start=1)
            ),
        ],
        "profile": [
            *(
                profile_record(mode, context=context, dtype=dtype)
                for mode in modes
                for context in (128, 512)
                for dtype in ("float32", "bfloat16")
            ),
            profile_record("forward", size="medium"),
            profile_record(experiments={"graph_replay": 0.3, "larger_batch": 1.1}, size="large"),
            *(
                profile_record(size="xl", batch=place, status=status, reason=FAILURES[status])
                for place, status in enumerate(FAILURES, start=1)
            ),
        ],
        "compile": [
            compile_record(warm_s=2.0),
            compile_record("attention"),
            *(
                compile_record(status=status, reason=FAILURES[status], case=f"model_{status}")
                for status in FAILURES
            ),
        ],
        "step": [
            rung_record("start", "start"),
            rung_record("bf16", "first", step=40.0),
            loss_record("start", 0, [9.0 - 0.1 * step for step in range(50)]),
            loss_record("bf16", 0, [9.0 - 0.1 * step for step in range(50)]),
            waterfall_record("start"),
            waterfall_record("graph", replay=0.5),
            step_race_record(peaks={"peer": 70.0, "ours": 60.0}),
            rung_record("flash", "alone", status="oom", reason=FAILURES["oom"]),
            rung_record("graph", "so far", status="skipped", reason=FAILURES["skipped"]),
            loss_record("graph", 0, (), status="error", reason=FAILURES["error"]),
            waterfall_record("fused-optimizer", status="timeout", reason=FAILURES["timeout"]),
            step_race_record("xl-512", status="oom", reason=FAILURES["oom"]),
        ],
        "own": [
            own_record(),
            own_record(50.0, setting={"dtype": "bfloat16"}),
            *(
                own_record(setting={"batch": place}, status=status, reason=FAILURES[status])
                for place, status in enumerate(FAILURES, start=1)
            ),
        ],
        "inspect": [
            *(inspected_record(rank, ranks=2, step=1.0 + rank) for rank in (0, 1)),
            *(
                inspected_record(place, ranks=6, status=status, reason=FAILURES[status])
                for place, status in enumerate(FAILURES, start=2)
            ),
        ],
        "advise": [
            trial_record(),
            trial_record(120.0),
            *(trial_record(status=status, reason=FAILURES[status]) for status in FAILURES),
        ],
        "warmup": [
            *(warmup_record(COLD, warmup) for warmup in (0, 1, 2)),
            *(
                warmup_record((), warmup, status=status, reason=FAILURES[status])
                for warmup, status in zip((3, 5, 6, 7), FAILURES, strict=True)
            ),
        ],
    }


def flash_records() -> list[Record]:
    return [
        *(
            flash_record(
                attention, seq=seq, dtype=dtype, both=seq / 1000, peak=seq * 9.0, error=1.1,
                registers=200 if attention == "triton" else None,
            )
            for attention in ("triton", "reference")
            for seq in (1024, 2048, 4096)
            for dtype in ("bfloat16", "float32")
        ),
        race_record({"triton": 4.0, "sdpa_flash": 7.0, "auto": 4.1}, out={"flex": "refused: no"}),
        race_record(
            {"triton": 0.1, "sdpa": 0.1, "auto": 0.1}, "1x1x128x64",
            in_a_row={"triton": 0.1, "sdpa": 0.1, "auto": 0.1},
        ),
        tiles_record(out={"128x128": "does not fit: out of resource: shared memory"}),
        *(
            flash_record(seq=16384, head=head, status=status, reason=FAILURES[status])
            for head, status in zip((16, 32, 64, 128), FAILURES, strict=True)
        ),
        race_record({"triton": 1.0}, "4x16x4096x64", status="oom", reason=FAILURES["oom"]),
        tiles_record("query", status="skipped", reason=FAILURES["skipped"]),
    ]  # fmt: skip


def test_every_study_is_tried_here() -> None:
    assert set(mixed_records()) == set(all_studies())


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("where", [ON_CPU, ON_GPU], ids=["cpu", "cuda"])
def test_every_preset_has_cases_of_every_study_with_keys_of_their_own(
    preset: str, where: object
) -> None:
    cases = preset_cases(preset, where)  # type: ignore[arg-type]
    assert {case.study for case in cases} == set(all_studies()) - NEED_A_STEP
    assert len({(case.study, case.key) for case in cases}) == len(cases) > 0


def test_a_case_that_two_parts_of_a_preset_share_is_there_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    once = preset_cases("quick", ON_CPU)
    for study in all_studies().values():
        share = study.presets(ON_CPU).get("quick", ())
        monkeypatch.setattr(study, "presets", lambda _, share=share: {"quick": (*share, *share)})
    assert preset_cases("quick", ON_CPU) == once


def test_one_study_has_its_share_of_a_preset_in_the_same_order() -> None:
    every = preset_cases("h200", environment())
    share = preset_cases("h200", environment(), "profile")
    assert share == tuple(case for case in every if case.study == "profile")
    assert {case.config["context"] for case in share[:18]} == {512}
    assert {case.config["context"] for case in share[18:28]} == {128}


def test_the_quick_preset_compiles_nothing_on_a_cpu_and_fits() -> None:
    for case in preset_cases("quick", ON_CPU):
        assert "compiler" not in case.needs
        assert case.config.get("subject", "toy") in ("toy", "tiny")
        assert case.config.get("size", "tiny") in ("tiny", "mini", "midi")
        assert case.config.get("seq", 0) <= 512


def test_a_preset_or_study_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UsageError, match=r"preset 'quik' does not exist.*perhaps you meant quick"):
        preset_cases("quik", ON_CPU)
    with pytest.raises(UsageError, match=r"study 'bench' does not exist.*benchmark"):
        find_study("bench")


def pages_hold(records: list[Record]) -> None:
    """Every block is whole: rows as wide as their table, and both pages can be written."""
    for study in dict.fromkeys(record.study for record in records):
        for block in find_study(study).view([r for r in records if r.study == study]):
            if isinstance(block, Table):
                assert {len(row) for row in block.rows} <= {len(block.columns)}, block.name
            if isinstance(block, Figure):
                assert all(len(c.x) == len(c.y) for c in block.curves), block.name
    page = make_page(records)
    html, text = html_page(page), markdown_page(page).replace("\\", "")
    assert "<b>no</b>" not in html
    for record in records:
        assert record.case in html
        assert record.case in text


@pytest.mark.parametrize("study", all_studies())
class TestViews:
    def test_of_records_with_every_outcome(self, study: str) -> None:
        records = mixed_records()[study]
        assert {record.status for record in records} == {"ok", *FAILURES}
        pages_hold(records)

    def test_of_a_single_record(self, study: str) -> None:
        for record in mixed_records()[study]:
            pages_hold([record])

    def test_of_no_record_that_is_ok(self, study: str) -> None:
        records = [record for record in mixed_records()[study] if record.status != "ok"]
        pages_hold(records)
        assert not [b for b in find_study(study).view(records) if isinstance(b, Figure)]

    def test_on_a_cpu_without_ceilings(self, study: str) -> None:
        make = {
            "benchmark": benchmark_record,
            "warmup": lambda **how: warmup_record(COLD, **how),
            "attention": attention_record,
            "profile": profile_record,
            "memory": memory_record,
            "checkpointing": checkpointing_record,
            "accumulation": sum_record,
            "autocast": autocast_record,
            "flash": flash_record,
            "compile": compile_record,
            "step": rung_record,
            "allreduce": collective_record,
            "ddp": ddp_record,
            "sharding": sharding_record,
            "fsdp": fsdp_record,
            "rehearsal": recorded_record,
            "levers": lever_record,
            "own": own_record,
            "inspect": inspected_record,
            "advise": trial_record,
        }
        pages_hold([make[study](environment=ON_CPU, ceilings=())])


def test_a_page_of_nothing_is_refused() -> None:
    with pytest.raises(StepscopeError, match="no records to show"):
        make_page([])


def test_the_page_of_all_studies_has_their_sections_in_order() -> None:
    records = [record for held in mixed_records().values() for record in held]
    pages_hold(records)
    names = [section.name for section in make_page(records[::-1]).sections]
    assert names == [
        "inspect",
        "own",
        "advise",
        "benchmark",
        "warmup",
        "profile",
        "memory",
        "checkpointing",
        "accumulation",
        "autocast",
        "attention",
        "flash",
        "compile",
        "step",
        "allreduce",
        "ddp",
        "sharding",
        "fsdp",
        "rehearsal",
        "levers",
        "machine",
        "records",
    ]
