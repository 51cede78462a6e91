"""Records of every study with every possible status of a case."""

from __future__ import annotations

import functools

from fp8_records import tensors_record, training_record
from grading_records import criterion_record, speed_record
from own_records import inspected_record, own_record, tried
from parallel_records import (
    collective_record,
    ddp_record,
    fsdp_record,
    leaderboard_record,
    sharding_record,
)
from precision_records import autocast_record, dot_record, square_record, sum_record
from rehearsal_records import recorded_record
from step_records import (
    compile_record,
    rung_record,
    waterfall_record,
)
from stepscope.records.schema import Record
from study_records import (
    attention_record,
    benchmark_record,
    checkpointing_record,
    flash_record,
    memory_record,
    profile_record,
    race_record,
    warmup_record,
)
from technique_records import card_record, technique_record

FAILURES = {
    "oom": "OutOfMemoryError: CUDA out of memory",
    "error": "RuntimeError: <b>no</b>",
    "timeout": "not done after 600 s (--timeout)",
    "skipped": "TF32 exists on NVIDIA GPUs from Ampere on",
}
COLD = [300.0, 150.0, *[100.0] * 10]


@functools.cache
def mixed_records() -> dict[str, list[Record]]:
    """Records by study, created once: that takes half a second."""
    modes = ("forward", "forward-backward", "train-step")
    valid = [
        benchmark_record(mode, context=context, dtype=dtype, phases={"forward": 30.0})
        for mode in modes
        for context in (128, 512)
        for dtype in ("float32", "bfloat16")
    ]
    failed = [
        benchmark_record(mode, size=size, status=status, reason=FAILURES[status])
        for size, status in zip(("medium", "large", "xl", "2.7b"), FAILURES, strict=True)
        for mode in modes
    ]
    partial = benchmark_record("forward", size="tiny")
    partial_failed = benchmark_record(size="tiny", status="oom", reason=FAILURES["oom"])
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
                ddp_record(context=64 * index, status=status, reason=FAILURES[status])
                for index, status in enumerate(FAILURES, start=1)
            ),
        ],
        "sharding": [
            *(sharding_record(ranks=ranks) for ranks in (1, 2, 4)),
            *(
                sharding_record(context=64 * index, status=status, reason=FAILURES[status])
                for index, status in enumerate(FAILURES, start=3)
            ),
        ],
        "fsdp": [
            *(fsdp_record(ranks=ranks) for ranks in (1, 2, 4)),
            *(
                fsdp_record(context=64 * index, status=status, reason=FAILURES[status])
                for index, status in enumerate(FAILURES, start=3)
            ),
        ],
        "check": [
            criterion_record(),
            criterion_record("lse", "lse"),
            *(
                criterion_record(criterion, status=status, reason=FAILURES[status])
                for criterion, status in zip(
                    ("ragged", "second-call", "dtypes", "scale"), FAILURES, strict=True
                )
            ),
            speed_record(),
        ],
        "leaderboard": [
            *(leaderboard_record(ranks=ranks) for ranks in (1, 2)),
            *(
                leaderboard_record(
                    flags={"context": 64 * index}, status=status, reason=FAILURES[status]
                )
                for index, status in enumerate(FAILURES, start=1)
            ),
        ],
        "rehearsal": [
            recorded_record(),
            recorded_record(context=256),
            *(
                recorded_record(context=64 * index, status=status, reason=FAILURES[status])
                for index, status in enumerate(FAILURES, start=5)
            ),
        ],
        "benchmark": [*valid, *failed, partial, partial_failed],
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
        "techniques": [
            card_record(),
            technique_record(),
            technique_record("recomputation", kept=(4e9, 1e9)),
            *(
                technique_record(technique, status=status, reason=FAILURES[status])
                for technique, status in zip(
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
        "fp8": [
            tensors_record(),
            tensors_record(size="medium"),
            training_record(),
            training_record(1, diverged_at=2),
            *(
                training_record(size=size, status=status, reason=FAILURES[status])
                for size, status in zip(("medium", "large", "tiny", "xl"), FAILURES, strict=True)
            ),
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
            *(
                checkpointing_record(str(2**index), status=status, reason=FAILURES[status])
                for index, status in enumerate(FAILURES, start=1)
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
                memory_record(context=64 * index, status=status, reason=FAILURES[status])
                for index, status in enumerate(FAILURES, start=1)
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
                profile_record(size="xl", batch=index, status=status, reason=FAILURES[status])
                for index, status in enumerate(FAILURES, start=1)
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
            waterfall_record("start"),
            waterfall_record("graph", replay=0.5),
            rung_record("flash", "alone", status="oom", reason=FAILURES["oom"]),
            rung_record("fused-loss", "alone", status="error", reason=FAILURES["error"]),
            rung_record("graph", "so far", status="skipped", reason=FAILURES["skipped"]),
            waterfall_record("compile", status="timeout", reason=FAILURES["timeout"]),
        ],
        "own": [
            own_record(),
            own_record(50.0, setting={"dtype": "bfloat16"}),
            *(
                own_record(setting={"batch": index}, status=status, reason=FAILURES[status])
                for index, status in enumerate(FAILURES, start=1)
            ),
        ],
        "inspect": [
            *(inspected_record(rank, ranks=2, step=1.0 + rank) for rank in (0, 1)),
            *(
                inspected_record(index, ranks=6, status=status, reason=FAILURES[status])
                for index, status in enumerate(FAILURES, start=2)
            ),
        ],
        "advise": [
            tried(),
            tried(120.0),
            *(tried(status=status, reason=FAILURES[status]) for status in FAILURES),
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
                attention,
                seq=seq,
                dtype=dtype,
                both=seq / 1000,
                peak=seq * 9.0,
                error=1.1,
                registers=200 if attention == "triton" else None,
            )
            for attention in ("triton", "reference")
            for seq in (1024, 2048, 4096)
            for dtype in ("bfloat16", "float32")
        ),
        race_record({"triton": 4.0, "sdpa_flash": 7.0, "auto": 4.1}, out={"flex": "refused: no"}),
        race_record(
            {"triton": 0.1, "sdpa": 0.1, "auto": 0.1},
            "1x1x128x64",
            in_a_row={"triton": 0.1, "sdpa": 0.1, "auto": 0.1},
        ),
        *(
            flash_record(seq=16384, head=head, status=status, reason=FAILURES[status])
            for head, status in zip((16, 32, 64, 128), FAILURES, strict=True)
        ),
        race_record({"triton": 1.0}, "4x16x4096x64", status="oom", reason=FAILURES["oom"]),
    ]
