"""A page like that of a real run, for the tests of the writers."""

from __future__ import annotations

import math

from stepscope.report.blocks import (
    Block,
    Cell,
    Column,
    Curve,
    Figure,
    Finding,
    Interval,
    LimitLine,
    Page,
    Section,
    Spread,
    Table,
)

SIZES = (
    ("small", 768, 3072, 12, 12, 0.128),
    ("medium", 1024, 4096, 24, 16, 0.423),
    ("large", 1280, 5120, 36, 20, 0.969),
    ("xl", 1600, 6400, 48, 25, 1.998),
    ("2.7b", 2560, 10240, 32, 32, 3.407),
)
CONTEXTS = (128, 256, 512, 1024, 2048)
CEILING = 7.92e14
BATCH = 4


def step_ms(billions: float, context: int) -> float:
    """Time of a step that is launch-bound at small sizes and compute-bound at large ones."""
    return max(9.0 * billions**0.35 + 8, billions * context * BATCH * 6 / 420 * (1 + context / 6e3))


def rate_of(billions: float, context: int) -> float:
    return 6 * billions * 1e9 * BATCH * context / step_ms(billions, context) * 1e3


def fits(billions: float, context: int) -> bool:
    return billions * 18 + billions**0.5 * context * 0.045 < 139


def headline() -> Table:
    return Table(
        name="headline",
        title="Summary of the runs",
        columns=(
            Column(title="Training step"),
            Column(title="Time", kind="number", unit="ms"),
            Column(title="Throughput", kind="rate", unit="tokens/s"),
            Column(title="Arithmetic", kind="rate", unit="FLOP/s", hint="Model FLOPs per second."),
            Column(title="MFU", kind="percent", hint="Model FLOPs over the measured matmul rate."),
            Column(title="Peak memory", kind="bytes"),
        ),
        rows=(
            (
                "as written, float32",
                Spread(value=1184.2, plus_minus=3.1),
                1730.0,
                3.54e13,
                0.045,
                52e9,
            ),
            ("bfloat16, flash", Spread(value=231.7, plus_minus=0.9), 8840.0, 1.81e14, 0.229, 38e9),
            (
                "every verified change",
                Spread(value=118.4, plus_minus=0.3),
                17300.0,
                3.54e14,
                0.447,
                31e9,
            ),
        ),
        caption="Size xl, context 512, batch 4; median of 20 steps after 5 warm-up steps.",
    )


def benchmark_table() -> Table:
    rows: list[tuple[Cell, ...]] = []
    details: list[str] = []
    for name, d_model, d_ff, layers, heads, billions in SIZES:
        for context in CONTEXTS:
            shape = (name, d_model, d_ff, layers, heads, context)
            if not fits(billions, context):
                rows.append((*shape, "OOM", None, None, None, None, None, None))
                details.append(
                    "status   oom\nreason   CUDA out of memory: tried to allocate 2.00 GiB"
                )
                continue
            total = step_ms(billions, context)
            rate = rate_of(billions, context)
            rows.append(
                (
                    *shape,
                    Spread(value=total * 0.29, plus_minus=total * 0.002),
                    Spread(value=total * 0.58, plus_minus=total * 0.003),
                    Spread(value=total, plus_minus=total * 0.004),
                    BATCH * context / total * 1e3,
                    rate,
                    rate / CEILING,
                    billions * 18e9 + billions**0.5 * context * 4.5e7,
                )
            )
            details.append(
                f"status   ok\nsamples  {total:.2f} {total * 1.01:.2f} {total * 0.99:.2f}"
            )
    return Table(
        name="benchmark",
        title="Step time by size and context",
        columns=(
            Column(title="Size"),
            Column(title="d_model", kind="count"),
            Column(title="d_ff", kind="count"),
            Column(title="Layers", kind="count"),
            Column(title="Heads", kind="count"),
            Column(title="Context", kind="count", unit="tokens"),
            Column(title="Forward", kind="number", unit="ms", hint="Device time by events."),
            Column(title="Backward", kind="number", unit="ms"),
            Column(title="Step", kind="number", unit="ms", hint="Forward, backward and optimizer."),
            Column(title="Throughput", kind="rate", unit="tokens/s"),
            Column(title="Arithmetic", kind="rate", unit="FLOP/s"),
            Column(title="MFU", kind="percent"),
            Column(title="Peak", kind="bytes", hint="Peak of the allocated bytes."),
        ),
        rows=tuple(rows),
        caption="Batch 4, bfloat16. Mean ± standard deviation of 10 steps after 5 warm-up steps.",
        details=tuple(details),
    )


def step_figure() -> Figure:
    curves = []
    for name, *_, billions in SIZES:
        fitting = tuple(context for context in CONTEXTS if fits(billions, context))
        y = tuple(step_ms(billions, context) for context in fitting)
        curves.append(
            Curve(
                label=name,
                x=tuple(float(context) for context in fitting),
                y=y,
                low=tuple(value * 0.93 for value in y),
                high=tuple(value * 1.08 for value in y),
            )
        )
    return Figure(
        name="step-by-context",
        title="Step time against context",
        curves=tuple(curves),
        x_label="context (tokens)",
        y_label="step (ms)",
        x_log=True,
        y_log=True,
        caption="Bars are the 95 % interval of the mean. A curve ends at the first out-of-memory.",
    )


def mfu_figure() -> Figure:
    names = tuple(size[0] for size in SIZES)
    return Figure(
        name="mfu",
        title="Arithmetic rate against the ceiling",
        kind="bars",
        curves=(
            Curve(label="float32", x=names, y=(31.0, 38.0, 41.0, 42.0, 44.0)),
            Curve(
                label="bfloat16",
                x=names,
                y=(96.0, 190.0, 262.0, 311.0, 402.0),
                low=(92.0, 186.0, 259.0, 305.0, 399.0),
                high=(100.0, 194.0, 265.0, 317.0, 405.0),
            ),
        ),
        x_label="size",
        y_label="arithmetic (TFLOP/s)",
        marks=(LimitLine(label="measured bfloat16 ceiling", value=CEILING / 1e12),),
        caption="Context 512, batch 4.",
    )


def warmup_figure() -> Figure:
    steps = tuple(float(step) for step in range(1, 21))
    return Figure(
        name="warmup",
        title="The first twenty steps",
        curves=(
            Curve(
                label="xl, bfloat16",
                x=steps,
                y=tuple(231.7 + 640 * math.exp(-1.4 * (step - 1)) for step in steps),
            ),
        ),
        x_label="step",
        y_label="time (ms)",
        marks=(LimitLine(label="steady", value=231.7),),
    )


def kernel_table(count: int = 40) -> Table:
    """A long table with details, like that of the profile study."""
    total = sum(1 / (rank + 1) for rank in range(count))
    return Table(
        name="kernels",
        title="Kernels by time",
        columns=(
            Column(title="Kernel"),
            Column(title="Calls", kind="count"),
            Column(title="Time", kind="number", unit="ms"),
            Column(title="Share", kind="percent"),
            Column(title="Bandwidth", kind="rate", unit="B/s"),
        ),
        rows=tuple(
            (
                f"sm90_xmma_gemm_bf16bf16_{64 << rank % 3}x{128 << rank % 2}_kernel_{rank}",
                48 * (1 + rank % 5),
                Interval(value=90 / (rank + 1), low=88 / (rank + 1), high=93 / (rank + 1)),
                1 / (rank + 1) / total,
                4.1e12 / (1 + rank % 7),
            )
            for rank in range(count)
        ),
        details=tuple(
            f"void cutlass::Kernel<{rank}>(Params)\ngrid 132, block 384" for rank in range(count)
        ),
    )


def section(name: str, title: str, question: str, *blocks: Block) -> Section:
    return Section(name=name, title=title, question=question, blocks=blocks)


def sample_page() -> Page:
    return Page(
        title="Training step on NVIDIA H200",
        subtitle="torch 2.11, CUDA 12.8, driver 570.86 · 46 cases, 44 measured, 2 out of memory",
        headline=headline(),
        sections=(
            section(
                "benchmark",
                "Benchmark",
                "How long do forward, backward and the optimizer take, by size and context?",
                Finding(
                    text="The backward pass takes 2.00 times as long as the forward pass at every "
                    "size, as its FLOPs predict.",
                    tone="good",
                ),
                Finding(
                    text="Below context 512 the small size is launch-bound, not compute-bound."
                ),
                Finding(
                    text="Size 2.7b does not fit at context 2,048 with AdamW in float32.",
                    tone="warn",
                ),
                step_figure(),
                benchmark_table(),
                mfu_figure(),
            ),
            section(
                "warmup",
                "Warm-up",
                "How many steps does it take until the step time is steady?",
                Finding(
                    text="After 4 steps every step lies within 1 % of the steady 231.7 ms.",
                    tone="good",
                ),
                warmup_figure(),
            ),
            section(
                "profile",
                "Profile",
                "Which kernels take the time?",
                Finding(
                    text="Matmuls take 61.4 % of the device time, element-wise kernels 27.8 %."
                ),
                kernel_table(),
            ),
        ),
    )


HOSTILE = "</script><img src=x onerror=alert(1)> ${x} {{ 7*7 }} \"'`| \\n & %s [red]b[/red] $x_1^2$"


def hostile_page() -> Page:
    """A page with malicious text in every text field."""
    h = HOSTILE
    table = Table(
        name=h,
        title=h,
        columns=(Column(title=h, hint=h), Column(title=h, kind="number", unit=h, hint=h)),
        rows=((h, 1.0), (h, h), ("=1+2", None)),
        caption=h,
        details=(h, h, h),
    )
    return Page(
        title=h,
        subtitle=h,
        headline=table,
        sections=tuple(
            section(
                h,
                h,
                h,
                Finding(text=h, tone="warn"),
                table,
                Figure(
                    name=h,
                    title=h,
                    kind=kind,
                    curves=(
                        Curve(label=h, x=(h, "b"), y=(1.0, 2.0)),
                        Curve(label=f"_{h}", x=(h, "b"), y=(1.0, 3.0)),
                    ),
                    x_label=h,
                    y_label=h,
                    marks=(LimitLine(label=h, value=1.5),),
                    caption=h,
                ),
            )
            for kind in ("lines", "bars")
        ),
    )
