"""FP8 linear layers by shape: bf16, the casts and GEMMs of each recipe alone, and both together.

    python benchmarks/fp8_linear.py --out fp8_linear.jsonl   all shapes, under 3 minutes
    python benchmarks/fp8_linear.py --models 2.7b --recipes tensorwise delayed

Times are of the three GEMMs of a layer (output, gradient of the input, gradient of the weight in
float32) with the casts that the recipe needs for one step. "known amax" leaves out the pass over
activations and gradients that the kernels before them save. Each is the median of repeated blocks
of consecutive launches; errors are relative to float64 on a few rows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stepscope.kernels.fp8 import choice
from stepscope.kernels.fp8.casts import History, Quantized, quantize, quantize_weights, scaled_mm
from stepscope.kernels.fp8.recipe import BF16, DELAYED, E4M3, E5M2, Recipe, unavailable
from stepscope.kernels.fp8.saved import transposed
from stepscope.kernels.matmul import matmul_to_dtype

MODELS: dict[str, tuple[int, int, int, int, int]] = {
    # tokens, width, rows of fused QKV, width of the MLP, layers
    "2.7b": (8192, 2560, 7680, 10_240, 32),
    "xl": (8192, 1600, 4800, 6400, 48),
    "8b": (32_768, 4096, 12_288, 11_008, 34),
    "llama_1b": (8192, 2048, 3072, 8192, 16),
}
RECIPES = {
    "tensorwise": Recipe(),
    "tensorwise, e5m2 gradients": Recipe(gradient_dtype=E5M2),
    "tensorwise, forward fast": Recipe(fast_accumulation="forward"),
    "tensorwise, dW in bf16": Recipe(weight_gradient=BF16),
    "delayed": Recipe(DELAYED),
    "rowwise": Recipe("rowwise"),
    "blockwise": Recipe("blockwise", fast_accumulation="none"),
}
ROUNDS = 5


def layers(model: str) -> dict[str, tuple[int, int, int]]:
    """Return tokens, inputs and outputs of the linear layers of a block."""
    tokens, d, qkv, hidden, _ = MODELS[model]
    return {
        "qkv": (tokens, d, qkv),
        "attention output": (tokens, d, d),
        "gate and up": (tokens, d, 2 * hidden),
        "down": (tokens, hidden, d),
    }


def milliseconds(function: Callable[[], object], block_ms: float) -> float:
    """Return the median time of one launch in blocks of consecutive ones."""
    for _ in range(3):
        function()
    torch.cuda.synchronize()
    times = []
    count = 8
    for number in range(ROUNDS + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(count):
            function()
        end.record()
        torch.cuda.synchronize()
        each = start.elapsed_time(end) / count
        if number:
            times.append(each)
        count = max(4, min(2000, round(block_ms / max(each, 1e-4))))
    return statistics.median(times)


class Layer:
    """Operands of one layer."""

    def __init__(self, tokens: int, d_in: int, d_out: int) -> None:
        generator = torch.Generator("cuda").manual_seed(0)

        def draw(*shape: int, scale: float = 1.0) -> Tensor:
            return torch.randn(shape, device="cuda", generator=generator) * scale

        self.x = draw(tokens, d_in).bfloat16()
        self.grad = draw(tokens, d_out, scale=1e-5).bfloat16()
        self.weight = draw(d_out, d_in, scale=d_in**-0.5)
        self.narrow = self.weight.bfloat16()

    def bf16(self) -> None:
        matmul_to_dtype(self.x, self.narrow.T, torch.bfloat16)
        matmul_to_dtype(self.grad, self.narrow, torch.bfloat16)
        matmul_to_dtype(self.grad.T, self.x, torch.float32)

    def gemms(
        self, recipe: Recipe, x: Quantized, grad: Quantized, weight: Quantized
    ) -> tuple[Tensor, Tensor, Tensor]:
        fast = recipe.fast(forward=False)
        out = scaled_mm(
            x.operand(True), weight.operand(True), torch.bfloat16, recipe.fast(forward=True)
        )
        grad_x = scaled_mm(grad.operand(True), weight.operand(False), torch.bfloat16, fast)
        if recipe.weight_gradient == BF16:
            return out, grad_x, matmul_to_dtype(self.grad.T, self.x, torch.float32)
        return out, grad_x, scaled_mm(grad.operand(False), x.operand(False), torch.float32, fast)

    def weights(self, recipe: Recipe) -> Quantized:
        """Return the operands of both GEMMs, as the forward and the backward pass create them."""
        cast = quantize_weights([self.weight], recipe)
        if cast.columns is not None:
            return cast
        return cast._replace(columns=transposed(cast.operand(rows=True)))

    def casts(
        self, recipe: Recipe, partials: Sequence[Tensor | None], histories: Sequence[Any]
    ) -> tuple[Quantized, Quantized]:
        both = recipe.weight_gradient != BF16
        dtypes = (E4M3, recipe.gradient_dtype)
        first, second = (
            quantize(one, dtype, recipe, columns=both, partial=partial, history=history)
            for one, dtype, partial, history in zip(
                (self.x, self.grad), dtypes, partials, histories, strict=True
            )
        )
        return first, second

    def errors(self, results: Sequence[Tensor]) -> list[float]:
        """Return relative errors against float64 on the first rows of each result."""
        rows = slice(0, 64)
        x, grad, weight = self.x.double(), self.grad.double(), self.weight.double()
        exact = x[rows] @ weight.T, grad[rows] @ weight, grad[:, rows].T @ x
        return [
            ((found[rows].double() - true).norm() / true.norm()).item()
            for found, true in zip(results, exact, strict=True)
        ]


def measure(model: str, name: str, recipes: Sequence[str], block_ms: float) -> list[dict[str, Any]]:
    tokens, d_in, d_out = layers(model)[name]
    layer = Layer(tokens, d_in, d_out)
    shape = {"model": model, "layer": name, "tokens": tokens, "d_in": d_in, "d_out": d_out}
    lines: list[dict[str, Any]] = [
        shape | {"recipe": "bf16", "gemms_ms": milliseconds(layer.bf16, block_ms)}
    ]
    known = [one.float().abs().max().view(1) for one in (layer.x, layer.grad)]
    for label in recipes:
        recipe = RECIPES[label]
        if reason := unavailable("cuda", recipe):
            lines.append(shape | {"recipe": label, "skipped": reason})
            continue
        histories: list[History | None] = [None, None]
        if recipe.scaling == DELAYED:
            histories = [History(recipe.history, layer.x.device) for _ in range(2)]
        try:
            weight = layer.weights(recipe)
            x, grad = layer.casts(recipe, (None, None), histories)
            results = layer.gemms(recipe, x, grad, weight)
        except RuntimeError as error:
            lines.append(shape | {"recipe": label, "skipped": str(error).splitlines()[0]})
            continue
        partials: Sequence[Tensor | None] = known if recipe.one_scale else (None, None)

        def together(
            recipe: Recipe = recipe, partials: Any = partials, histories: Any = histories
        ) -> None:
            weight = layer.weights(recipe)
            layer.gemms(recipe, *layer.casts(recipe, partials, histories), weight)

        times = {
            "gemms_ms": milliseconds(
                lambda r=recipe, a=x, b=grad, c=weight: layer.gemms(r, a, b, c), block_ms
            ),
            "casts_ms": milliseconds(
                lambda r=recipe, h=histories: layer.casts(r, (None, None), h), block_ms
            ),
            "casts_known_amax_ms": milliseconds(
                lambda r=recipe, p=partials, h=histories: layer.casts(r, p, h), block_ms
            ),
            "weight_cast_ms": milliseconds(lambda r=recipe: layer.weights(r), block_ms),
            "together_ms": milliseconds(together, block_ms),
        }
        predicted = choice.estimate(tokens, d_in, d_out, recipe)
        lines.append(
            shape
            | {"recipe": label, "errors": layer.errors(results), **times}
            | {"predicted_ms": 1e3 * (predicted.fp8_s + predicted.casts_s)}
        )
    return lines


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Write the sums over the layers of a block, by model and recipe."""
    out = [f"{'model':10} {'recipe':28} {'GEMMs':>8} {'casts':>8} {'known':>8} {'total':>8}  gain"]
    for model in dict.fromkeys(line["model"] for line in lines):
        of_model = [line for line in lines if line["model"] == model]
        base = sum(line["gemms_ms"] for line in of_model if line["recipe"] == "bf16")
        for recipe in dict.fromkeys(line["recipe"] for line in of_model):
            mine = [line for line in of_model if line["recipe"] == recipe]
            if any("skipped" in line for line in mine):
                out.append(f"{model:10} {recipe:28} {mine[0].get('skipped', 'skipped')}")
                continue
            sums = {
                key: sum(line.get(key, 0.0) for line in mine)
                for key in ("gemms_ms", "casts_ms", "casts_known_amax_ms", "together_ms")
            }
            total = sums["together_ms"] or sums["gemms_ms"]
            values = " ".join(f"{value:8.3f}" for value in sums.values())
            out.append(f"{model:10} {recipe:28} {values}  {base / total:.3f}x")
    return "\n".join(out)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--recipes", nargs="+", choices=list(RECIPES), default=list(RECIPES))
    parser.add_argument("--block-ms", type=float, default=40.0, help="length of a timed block")
    parser.add_argument("--out", type=Path, help="file for one JSON line per shape and recipe")
    args = parser.parse_args(words)
    if not torch.cuda.is_available() or (reason := unavailable("cuda")):
        print(reason if torch.cuda.is_available() else unavailable("cpu"), file=sys.stderr)
        return 2
    machine = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    lines = []
    for model in args.models:
        for name in layers(model):
            for line in measure(model, name, args.recipes, args.block_ms):
                lines.append(line)
                print(json.dumps(line), file=sys.stderr, flush=True)
                if args.out:
                    with args.out.open("a") as file:
                        file.write(json.dumps(line | machine) + "\n")
            torch.cuda.empty_cache()
    print(table(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
