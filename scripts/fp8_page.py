"""The sections of docs/results/precision.md on training in FP8: learning from
results/fp8-learning_h200.jsonl, and full steps from results/fp8-step_h200.jsonl.

`python scripts/make_docs.py` generates each once there are records.
"""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any, NamedTuple

from page_parts import commits_of, figure_files, lines_of, shown

from stepscope.report.blocks import Block, Curve, Figure, LimitLine
from stepscope.report.format import duration, number, percent
from stepscope.report.tables import col, table

FILE = "fp8-learning_h200.jsonl"
STEPS = "fp8-step_h200.jsonl"
_LAST = 100
"""Steps at the end whose mean loss is compared."""
_DRAWN = 20
"""Points of a curve."""
_SAME = 0.005
_PEER_NAMES = ("torchao", "compiled")
_LAYERS = {"fp8": "all", "fp8-auto": "by the rule"}
"""The linear layers of the blocks in FP8."""

_MODELS = {
    "own_2.7b": "TransformerLM 2.7b",
    "own_xl": "TransformerLM xl",
    "own_8b": "TransformerLM 8b, 1 × 32,768",
    "hf_llama_1b": "Hugging Face Llama 1B",
}
"""Models of the steps, with batch and context where these are not 4 × 2048."""

Line = dict[str, Any]


class Learned:
    """The trainings of one model: pairs of bfloat16 and a choice of FP8 layers by seed."""

    def __init__(self, model: str, dtype: str, lines: list[Line]) -> None:
        self.model, self.dtype = model, dtype
        by = {(line["dtype"], line["seed"]): line for line in lines}
        seeds = sorted({line["seed"] for line in lines})
        self.pairs = [
            (by["bf16", seed], by[dtype, seed])
            for seed in seeds
            if ("bf16", seed) in by and (dtype, seed) in by
        ]
        self._alone = [line for line in lines if line["dtype"] == "bf16"]

    @property
    def changes(self) -> list[float]:
        """FP8's final loss over bfloat16's, minus 1, of each pair that did not diverge."""
        return [
            final(fp8) / final(bf16) - 1
            for bf16, fp8 in self.pairs
            if bf16["diverged_at"] is None and fp8["diverged_at"] is None
        ]

    @property
    def change(self) -> float | None:
        return fmean(self.changes) if self.changes else None

    @property
    def spread(self) -> float | None:
        """Standard deviation of bfloat16's final loss over all seeds, relative to its mean."""
        finals = [final(bf16) for bf16 in self._alone if bf16["diverged_at"] is None]
        return stdev(finals) / fmean(finals) if len(finals) > 1 else None

    @property
    def diverged(self) -> int:
        return sum(fp8["diverged_at"] is not None for _, fp8 in self.pairs)

    @property
    def same(self) -> bool:
        """Within 0.5 % of bfloat16, or within its own spread over seeds."""
        allowed = max(_SAME, self.spread or 0.0)
        return not self.diverged and self.change is not None and abs(self.change) <= allowed


def final(line: Line) -> float:
    return fmean(line["losses"][-_LAST:])


def learned(lines: list[Line]) -> list[Learned]:
    models = dict.fromkeys(line["model"] for line in lines)
    every = (
        Learned(model, dtype, [line for line in lines if line["model"] == model])
        for model in models
        for dtype in _LAYERS
    )
    return [one for one in every if one.pairs]


def learning_part(results: Path) -> tuple[list[str], dict[str, str]]:
    """Return the paragraphs and the figure files; nothing without trainings."""
    path = results / FILE
    if not path.exists():
        return [], {}
    lines = lines_of(path)
    models = learned(lines)
    if not models:
        return [], {}
    blocks: list[Block] = [_table(models), *chain.from_iterable(map(_figures, models))]
    first = models[0].pairs[0][1]
    text = (
        f"`python benchmarks/fp8_learning.py` on {first['device']}, torch {first['torch']},"
        f" {commits_of(line['commit'] or '' for line in lines)}: FP8 in all linear layers of the"
        " blocks, or where the rule by shape predicts a gain, next to"
        " bfloat16. Both start from the same weights and see the same text: the sources of Python's"
        " standard library, byte by byte."
    )
    answers = "\n".join(f"- {_outcome(one)}" for one in models if one.changes)
    return ["## Does a model learn in FP8?", answers, text, *shown(blocks)], figure_files(blocks)


def _outcome(one: Learned) -> str:
    layers = f"FP8 in {one.pairs[0][1]['fp8_weights']} weights ({_LAYERS[one.dtype]})"
    spread = (
        "" if one.spread is None else f"; bfloat16's own varies by {percent(one.spread)} over seeds"
    )
    return (
        f"{one.model}, {layers}: the final loss differs by {percent(one.change or 0.0)} from"
        f" bfloat16's, mean over {len(one.changes)} seeds{spread}."
    )


def _table(models: list[Learned]) -> Block:
    return table(
        "fp8-learning",
        "Mean loss of the last 100 steps",
        models,
        [
            col("model", lambda one: one.model),
            col(
                "layers in FP8",
                lambda one: f"{_LAYERS[one.dtype]}: {one.pairs[0][1]['fp8_weights']} weights",
            ),
            col("recipe", lambda one: one.pairs[0][1]["recipe"]),
            col("parameters", lambda one: one.pairs[0][0]["parameters"], "count"),
            col("steps", lambda one: one.pairs[0][0]["steps"], "count"),
            col("seeds", lambda one: len(one.pairs), "count"),
            col("bf16", lambda one: fmean(final(bf16) for bf16, _ in one.pairs), unit="nats"),
            col("FP8", lambda one: fmean(final(fp8) for _, fp8 in one.pairs), unit="nats"),
            col("change", lambda one: one.change, "percent", hint="mean over the seeds"),
            col(
                "largest change",
                lambda one: max(one.changes, key=abs, default=None),
                "percent",
                hint="of one seed",
            ),
            col(
                "bf16 over seeds",
                lambda one: one.spread,
                "percent",
                hint="standard deviation of bfloat16's own loss over all its seeds",
            ),
            col("diverged", lambda one: one.diverged, "count"),
            col("the same", lambda one: "yes" if one.same else "no"),
        ],
        caption="The same: no divergence, and within 0.5 % of bfloat16 or within its own spread"
        " over seeds.",
    )


def _figures(one: Learned) -> tuple[Figure, Figure]:
    """Return the loss in both dtypes, and what FP8 changes, over the steps."""
    bf16, fp8 = ([_means(line["losses"]) for line in some] for some in zip(*one.pairs, strict=True))
    changes = [
        [100 * (new / old - 1) for old, new in zip(*pair, strict=True)]
        for pair in zip(bf16, fp8, strict=True)
    ]
    width = _window(one.pairs[0][0]["losses"])
    rule = " by the rule" if one.dtype == "fp8-auto" else ""
    name = f"fp8-learning-{one.model}{'-auto' if rule else ''}"
    of_seeds = f"Means of {width} steps, averaged over {len(one.pairs)} seeds; bars: all seeds."
    loss = Figure(
        name=name,
        title=f"Training loss of {one.model} in bfloat16 and FP8{rule}",
        curves=(_curve("bf16", bf16, width, 0), _curve("FP8", fp8, width, 1)),
        x_label="step",
        y_label="loss, nats",
        y_log=True,
        caption=of_seeds,
    )
    change = Figure(
        name=f"{name}-change",
        title=f"What FP8{rule} changes in the training loss of {one.model}",
        curves=(_curve("FP8", changes, width, 1),),
        x_label="step",
        y_label="change of the loss, %",
        marks=(LimitLine(label="the same", value=0.0),),
        caption=of_seeds,
    )
    return loss, change


def _window(losses: list[float]) -> int:
    return max(1, len(losses) // _DRAWN)


def _means(losses: list[float]) -> list[float]:
    width = _window(losses)
    return [fmean(losses[i : i + width]) for i in range(0, len(losses) - width + 1, width)]


def _curve(label: str, seeds: list[list[float]], width: int, style: int) -> Curve:
    points = list(zip(*seeds, strict=True))
    return Curve(
        label=label,
        x=tuple(float((index + 1) * width) for index in range(len(points))),
        y=tuple(map(fmean, points)),
        low=tuple(map(min, points)),
        high=tuple(map(max, points)),
        style=style,
    )


class Step(NamedTuple):
    """One form of a step in one process."""

    row: str
    form: str
    policy: str
    ms: float
    peer: tuple[float, str] | None
    """Time and form of the best of torchao and of compiled blocks in the same process."""
    peak_gib: float
    joules: float | None


def steps_of(lines: list[Line]) -> list[Step]:
    """Return the median over the blocks of each form. A process begins with block 0."""
    processes: list[list[Line]] = []
    for line in lines:
        if line["block"] == 0:
            processes.append([])
        if "median_ms" in line:
            processes[-1].append(line)
    return [step for blocks in processes for step in _of_process(blocks)]


def _of_process(blocks: list[Line]) -> list[Step]:
    forms: dict[tuple[str, str], list[Line]] = {}
    for line in blocks:
        forms.setdefault((line["row"], line["form"]), []).append(line)
    times = {name: median(line["median_ms"] for line in some) for name, some in forms.items()}
    steps = []
    for (row, form), some in forms.items():
        peers = [
            (ms, name)
            for (of, name), ms in times.items()
            if of == row and name.startswith(_PEER_NAMES)
        ]
        energies = [line["joules"] for line in some if "joules" in line]
        steps.append(
            Step(
                _MODELS[row],
                form,
                some[0].get("policy", ""),
                times[row, form],
                min(peers, default=None),
                max(line["peak_gib"] for line in some),
                median(energies) if energies else None,
            )
        )
    return steps


def step_part(results: Path) -> list[str]:
    """Return the paragraphs on full steps; nothing without records."""
    path = results / STEPS
    lines = lines_of(path)
    if not lines:
        return []
    steps = steps_of(lines)
    blocks: list[Block] = [
        table(
            "fp8-step",
            "Training steps in FP8",
            steps,
            [
                col("model", lambda one: one.row),
                col("variant", lambda one: one.form),
                col("saved activations", lambda one: one.policy or "–"),
                col("step", lambda one: one.ms, unit="ms"),
                col(
                    "speedup",
                    lambda one: None if one.peer is None else one.peer[0] / one.ms,
                    "number",
                    unit="×",
                    hint="over the faster of torchao and compiled blocks in the same process",
                ),
                col("peak", lambda one: one.peak_gib, unit="GiB"),
                col("energy", lambda one: one.joules, unit="J"),
            ],
            caption="Medians over blocks of 4 s of consecutive steps in ABBA order. `bf16` and"
            " `fp8-…` are Stepscope's step, `torchao-…` is torchao's float8 training with compiled"
            " blocks. Speedup: over the faster of torchao and compiled blocks in the same process."
            " `forward-fast`: fast accumulation in the forward GEMMs only. Saved activations:"
            " `inputs` recomputes the first GEMM of each MLP.",
        )
    ]
    text = (
        f"`python benchmarks/fp8_step.py` on {lines[0]['device']}, torch {lines[0]['torch']},"
        f" {commits_of(line.get('commit') or '' for line in lines)}. Batch 4, context 2048, unless"
        " given."
    )
    return ["## How fast is a step in FP8?", text, _answers(steps), *shown(blocks)]


def _answers(steps: list[Step]) -> str:
    """Return the fastest FP8 step of each model against the fastest other library."""
    lines = []
    for model in dict.fromkeys(step.row for step in steps):
        own = [s for s in steps if s.row == model and s.form.startswith("fp8") and s.peer]
        if not own:
            continue
        best = min(own, key=lambda step: step.ms)
        assert best.peer is not None
        ms, name = best.peer
        lines.append(
            f"- {model}: {duration(best.ms)}, {number(ms / best.ms, 3)} times as fast as {name}"
            f" ({duration(ms)})."
        )
    return "\n".join(lines)
