"""Whole training steps in FP8 against bf16 and against torchao's float8 training, in one process.

    python benchmarks/fp8_step.py --out fp8_step.jsonl                        all rows and forms
    python benchmarks/fp8_step.py --rows own_2.7b --forms bf16 fp8-tensorwise torchao-tensorwise
    python benchmarks/fp8_step.py --rows own_2.7b --policy inputs             least memory
    python benchmarks/fp8_step.py --tiny                                      sizes for a CPU

Blocks of at least `--seconds` of consecutive steps in ABBA order (`benchmarks/acceleration.py`).
`bf16` and `fp8-…` are Stepscope's step: its own model with fused projections and the optimizer in
the backward pass, others by `stepscope.accelerate`, both in a `TrainStep`; `graph-…` is
`accelerate` for its own model too. `torchao-…` converts the linear layers of the blocks (not
the head) and compiles the blocks; `compiled` does the latter only. With `-cudnn` torch prefers
cuDNN's attention.
8b has bfloat16 weights and recomputes gates, as its bf16
record; torchao is not tried there.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import acceleration
import torch
from acceleration import CUDNN, LR, Bench, EagerStep, SkippedError, Turns
from acceleration_rows import LLAMA_1B, SEED, Row, Shape, linear_decoder
from torch import Tensor, nn

from stepscope.kernels.fp8.layers import Fp8Layers
from stepscope.kernels.fp8.recipe import BF16, Recipe, unavailable

RECIPES = {
    "fp8-tensorwise": Recipe(),
    "fp8-tensorwise-forward-fast": Recipe(fast_accumulation="forward"),
    "fp8-delayed": Recipe("delayed"),
    "fp8-rowwise": Recipe("rowwise"),
    "fp8-blockwise": Recipe("blockwise", fast_accumulation="none"),
    "fp8-tensorwise-bf16-dw": Recipe(weight_gradient=BF16),
}
GRAPHS = {
    "graph-bf16": None,
    "graph-fp8": RECIPES["fp8-tensorwise"],
}
_PEERS = ("compiled", "torchao-tensorwise", "torchao-rowwise")
PEERS = (*_PEERS, *(peer + CUDNN for peer in _PEERS))
FORMS = ("bf16", *RECIPES, *GRAPHS, *PEERS)
POLICIES = {"own_8b": "inputs-16"}
"""Activation policies of rows that do not fit otherwise."""


def own_config(size: str, table: str, context: int) -> Callable[[bool], Any]:
    def config(tiny: bool) -> Any:
        from stepscope.model import find_size, with_overrides

        if tiny:
            small = find_size("tiny")
            return with_overrides(small, d_model=64, d_ff=128, context=16, vocab=64)
        return with_overrides(find_size(size, table), context=context)

    return config


def own(size: str, context: int, table: str = "2025") -> Callable[[bool], nn.Module]:
    def build(tiny: bool) -> nn.Module:
        from stepscope.attention.api import attention_with
        from stepscope.model import TransformerLM

        attention = attention_with("sdpa" if tiny else "sdpa_cudnn")
        return TransformerLM(own_config(size, table, context)(tiny), attention=attention)

    return build


ROWS = {
    row.name: row
    for row in (
        Row("own_2.7b", "own", own("2.7b", 2048), Shape(4, 2048, 10_000)),
        Row("linear_2.7b", "pairs", linear_decoder, Shape(4, 2048, 10_000)),
        Row("own_xl", "own", own("xl", 2048), Shape(4, 2048, 10_000)),
        Row("own_8b", "own", own("8b", 32_768, "2026"), Shape(1, 32_768, 151_936)),
        Row("hf_llama_1b", "hf", LLAMA_1B, Shape(4, 2048, 128_256)),
    )
}


class Fp8Bench(Bench):
    """One row: builds the step of each form."""

    @property
    def policy(self) -> str:
        """The activation policy of Stepscope's own model."""
        default = "all" if self.args.tiny else POLICIES.get(self.row.name, "all")
        return self.args.policy or default

    def step(self, form: str) -> Callable[[Any], Tensor]:
        if form.endswith(CUDNN):
            return acceleration._with_cudnn(self.step(form.removesuffix(CUDNN)))
        if form in PEERS:
            return self._peer(form)
        recipe = RECIPES.get(form) or GRAPHS.get(form)
        if recipe is not None and (reason := unavailable(self.device, recipe)):
            raise SkippedError(reason)
        if form in GRAPHS:
            return self._accelerated(recipe)
        return self._own(recipe) if self.row.family == "own" else self._accelerated(recipe)

    def _own(self, recipe: Recipe | None) -> Callable[[Any], Tensor]:
        import stepscope
        from stepscope.attention import attention
        from stepscope.kernels.activation_policy import policy_per_layer
        from stepscope.model import TransformerLM
        from stepscope.optim import InBackwardAdamW

        plain = self.row.build
        large = self.row.name == "own_8b"
        torch.manual_seed(SEED)
        with torch.device("meta"):
            config = plain(self.args.tiny).config
        fp8 = None if recipe is None else Fp8Layers(recipe)
        model = TransformerLM(
            config,
            attention=attention,
            device=self.device,
            dtype=torch.bfloat16 if large else torch.float32,
            fused=True,
            fused_projections=True,
            activation_policy=policy_per_layer(self.policy, config.n_layers),
            fp8=fp8,
        ).train()
        optimizer = InBackwardAdamW(model.parameters(), lr=LR, copies=model.copies)
        step = stepscope.TrainStep(
            model, optimizer, dtype=torch.bfloat16, graph="off" if large else "auto"
        )
        return _Explained(step, fp8)

    def _accelerated(self, recipe: Recipe | None) -> Callable[[Any], Tensor]:
        import stepscope

        model = self.model()
        optimizer = self._adamw(model)
        report = stepscope.accelerate(
            model, optimizer, dtype=recipe or torch.bfloat16,
            compile={"form": "compiled with passes"},
        )  # fmt: skip
        loss_fn = acceleration.loss_function(self.row)
        return _Explained(stepscope.TrainStep(model, optimizer, loss_fn=loss_fn), report.fp8)

    def _peer(self, form: str) -> Callable[[Any], Tensor]:
        if self.row.name == "own_8b":
            raise SkippedError("not tried at this size")
        model = self.model()
        if form != "compiled":
            self._convert(model, form.removeprefix("torchao-"))
        acceleration._compile_blocks(model)
        loss_fn = acceleration.loss_function(self.row)
        return EagerStep(model, self._adamw(model), loss_fn, self.device)

    @staticmethod
    def _convert(model: nn.Module, recipe: str) -> None:
        try:
            from torchao.float8 import Float8LinearConfig, convert_to_float8_training
        except ImportError as error:
            raise SkippedError(str(error)) from error
        convert_to_float8_training(
            model,
            config=Float8LinearConfig.from_recipe_name(recipe),
            module_filter_fn=lambda _, name: "head" not in name,
        )


class _Explained:
    """A step that says how many layers ran in FP8."""

    def __init__(self, step: Any, fp8: Fp8Layers | None) -> None:
        self._step, self._fp8 = step, fp8

    def __call__(self, batch: Any) -> Tensor:
        loss: Tensor = self._step(batch)
        return loss

    def explain(self) -> str:
        text = str(self._step.explain())
        if self._fp8 is None:
            return text
        reasons = [why for why in self._fp8.decisions.values() if why is not None]
        on = len(self._fp8.decisions) - len(reasons)
        why = f"; {len(reasons)} in bf16: {reasons[0]}" if reasons else ""
        return f"{on} layers in FP8{why}; {text}"


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Write the median of each form's blocks, with its ratio to the best of torchao and bf16."""
    out = [f"{'row':12} {'form':26} {'step':>11} {'vs peer':>8} {'peak':>10} {'energy':>9}  note"]
    for row in dict.fromkeys(line["row"] for line in lines):
        of_row = [line for line in lines if line["row"] == row]
        times: dict[str, float] = {}
        for form in dict.fromkeys(line["form"] for line in of_row):
            mine = [
                line["median_ms"] for line in of_row if line["form"] == form and "median_ms" in line
            ]
            if mine:
                times[form] = statistics.median(mine)
        best = min((ms for form, ms in times.items() if form in PEERS), default=float("nan"))
        for form in dict.fromkeys(line["form"] for line in of_row):
            mine = [line for line in of_row if line["form"] == form]
            note = next(
                (str(line[k]) for k in ("skipped", "explain") for line in mine if k in line), ""
            )
            if form not in times:
                out.append(f"{row:12} {form:26} {'-':>11} {'-':>8} {'-':>10} {'-':>9}  {note}")
                continue
            peak = max(line.get("peak_gib", 0.0) for line in mine)
            joules = next((f"{line['joules']:.1f} J" for line in mine if "joules" in line), "-")
            out.append(
                f"{row:12} {form:26} {times[form]:8.2f} ms {best / times[form]:7.3f}x"
                f" {peak:6.2f} GiB {joules:>9}  {note}"
            )
    return "\n".join(out)


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument(
        "--policy",
        default="",
        help="activation policy of own rows: all, norms, gates, inputs-12, …",
    )
    parser.add_argument("--seconds", type=float, default=4.0, help="length of a block")
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="file for one JSON line per block")
    return parser.parse_args(words)


def records(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for name in args.rows:
        bench = Fp8Bench(ROWS[name], args)
        for line in Turns(bench, args.forms).lines():
            own = bench.row.family == "own" and line["form"] not in PEERS
            yield line | ({"policy": bench.policy} if own else {})


def main(words: Sequence[str] | None = None) -> None:
    args = parse(words)
    print(table(acceleration.written(args, records(args))))


if __name__ == "__main__":
    main()
