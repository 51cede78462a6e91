"""A planted step whose best combination no single change shows."""

from __future__ import annotations

from typing import Any

from stepscope.analysis.advice.facts import Facts, PhaseWork, Runs


def llama(**changes: Any) -> Facts:
    """A Llama of 12 layers in float32 on a GPU, with naive attention, whose loss is read in every
    step: 126 ms. In bfloat16 the CPU takes longer to launch its kernels than they take."""
    forward = {"matmul": 32.0, "elementwise": 5.0, "softmax": 2.0, "copy/cast": 1.0}
    backward = {"matmul": 64.0, "elementwise": 9.0, "softmax": 3.0, "copy/cast": 2.0}
    runs = Runs(kernels=0.8, runs=0.2, longest=0.4)
    fields: dict[str, Any] = {
        "on_gpu": True,
        "step_ms": 126.0,
        "dtype": "float32",
        "phases": (
            PhaseWork(name="forward", classes=forward, launches=1100.0, runs=runs),
            PhaseWork(name="backward", classes=backward, launches=1500.0, runs=runs),
            PhaseWork(name="optimizer", classes={"optimizer": 8.0}, launches=700.0),
        ),
        "attention": (
            PhaseWork(name="forward", classes={"matmul": 3.0, "softmax": 2.0}, launches=60.0),
            PhaseWork(name="backward", classes={"matmul": 6.0, "softmax": 3.0}, launches=90.0),
        ),
        "launch_ms": 0.019,
        "waits": "end",
        "reads_back": True,
        "parameters": 200_000_000,
        "flops": 5e12,
        "optimizer_name": "AdamW",
        "loss_ms": 3.0,
        "logit_bytes": 1 << 29,
        "compiled_by_accelerate": True,
        "blocks": 12,
        "rates": {"float32": 50e12, "tf32": 400e12, "bfloat16": 800e12},
        "bandwidth": 4e12,
        "lacks": ("fp8",),
    }
    return Facts(**fields | changes)
