"""Dependence of an eager step on how finely its operations are split.

    python benchmarks/unfused_operations.py --size xl --context 512 --dtype bfloat16

The model under study uses one operation where torch has one (softmax, silu). The write-ups' models
split them: a softmax of five operations, silu as x·sigmoid(x), a mask built by index comparisons,
rotary pairs sliced by stride and stacked, matmuls by einsum. Both compute the same. This times
both, so that results of the two kinds of model can be compared.
"""

from __future__ import annotations

import argparse
import statistics

import torch
from torch import Tensor

from stepscope.analysis.predict.plan import MODES
from stepscope.measure.device import pick_device
from stepscope.measure.timer import time_step
from stepscope.model import layers
from stepscope.training.transformer import TransformerStep
from stepscope.training.workload import Workload


def softmax(x: Tensor) -> Tensor:
    exponentials = torch.exp(x - x.max(dim=-1, keepdim=True).values)
    return exponentials / exponentials.sum(dim=-1, keepdim=True)


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False, scale: float | None = None
) -> Tensor:
    scores = torch.einsum("...qd,...kd->...qk", q, k) * (scale or q.shape[-1] ** -0.5)
    if is_causal:
        position = torch.arange(q.shape[-2], device=q.device)
        visible = position[:, None] >= position[None, :]
        scores = torch.where(visible, scores, float("-inf"))
    return torch.einsum("...qk,...kd->...qd", softmax(scores), v)


def swiglu(self: layers.SwiGLU, x: Tensor) -> Tensor:
    gate = self.w1(x)
    return self.w2(gate * torch.sigmoid(gate) * self.w3(x))


def linear(self: layers.Linear, x: Tensor) -> Tensor:
    return torch.einsum("...i,oi->...o", x, self.weight)


def rotary(self: layers.RotaryEmbedding, x: Tensor) -> Tensor:
    position = torch.arange(x.shape[-2], device=x.device)
    cos, sin = self.cos[position], self.sin[position]
    first, second = x[..., 0::2], x[..., 1::2]
    rotated = torch.stack((first * cos - second * sin, first * sin + second * cos), dim=-1)
    return rotated.flatten(-2).to(x.dtype)


def split_operations(step: TransformerStep) -> None:
    """Replace the operations of a built model by their split variants."""
    for module in step.model.modules():
        if isinstance(module, layers.CausalSelfAttention):
            module.attend = attention
        for kind, forward in (
            (layers.SwiGLU, swiglu),
            (layers.Linear, linear),
            (layers.RotaryEmbedding, rotary),
        ):
            if isinstance(module, kind):
                module.forward = forward.__get__(module)  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="tiny")
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    device = pick_device()
    for mode in MODES:
        times = []
        for split in (False, True):
            device.release()
            step = TransformerStep(
                Workload(
                    size=args.size, context=args.context, batch=4, dtype=args.dtype, mode=mode
                ),
                device,
            )
            if split:
                split_operations(step)
            timing = time_step(step.phases(), device, warmup=5, steps=10, before=step.reset)
            times.append(statistics.median(timing.series[0].values))
            del step
        print(
            f"{args.size} c{args.context} {args.dtype} {mode}: {times[0]:.1f} ms,"
            f" split {times[1]:.1f} ms, ratio {times[1] / times[0]:.2f}"
        )


if __name__ == "__main__":
    main()
