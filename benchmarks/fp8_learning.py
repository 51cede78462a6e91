"""Train with FP8 linear layers next to bfloat16, from the same weights on the same text.

    python benchmarks/fp8_learning.py --out fp8-learning_h200.jsonl --resume --time-limit 550

Each line is one training: a model, a dtype, a seed, and all of its losses. `fp8` is forced on every
eligible linear layer of the blocks, `fp8-auto` has the layers that the rule by shape selects;
everything else is equal. The text is the sources of Python's
standard library, byte by byte. With `--resume` trainings that the file has are left out, and one
that a time limit interrupted goes on from its checkpoint, so that several short visits to a GPU
complete the file.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stepscope import TrainStep
from stepscope.errors import StepscopeError
from stepscope.kernels.fp8.layers import Fp8Layers
from stepscope.kernels.fp8.recipe import Recipe, unavailable
from stepscope.measure.device import pick_device
from stepscope.measure.environment import describe
from stepscope.model.config import ModelConfig
from stepscope.model.sizes import find_size, with_overrides
from stepscope.model.transformer import TransformerLM
from stepscope.optim import FusedAdamW
from stepscope.training.text import VOCAB, TextBatches, library_text

_SAVED_EVERY_S = 60.0
_WARMUP = 0.05
"""Share of the steps in which the learning rate rises; then it falls to a tenth as a cosine."""


class Training(NamedTuple):
    """A model and how it is trained."""

    config: ModelConfig
    batch: int
    context: int
    steps: int
    learning_rate: float


def _sized(name: str, context: int, **changes: int) -> ModelConfig:
    return with_overrides(find_size(name), context=context, vocab=VOCAB, **changes)


MODELS = {
    "small": Training(_sized("small", 512), 8, 512, 3000, 1e-3),
    # 302 million parameters.
    "300m": Training(_sized("medium", 512, n_layers=18), 8, 512, 1000, 6e-4),
    "tiny": Training(_sized("tiny", 64), 4, 64, 20, 1e-3),
}
DTYPES = ("bf16", "fp8", "fp8-auto")
"""`fp8`: in every eligible layer; `fp8-auto`: where the rule by shape predicts a gain."""


class Run:
    """One training, which can be saved and continued."""

    def __init__(
        self, model: str, dtype: str, seed: int, recipe: Recipe, device: torch.device
    ) -> None:
        self.name, self.dtype, self.seed, self._device = model, dtype, seed, device
        self.training = MODELS[model]
        torch.manual_seed(seed)
        self.model = TransformerLM(
            self.training.config, device=device, fused=True, fused_projections=True
        )
        self.layers = Fp8Layers(recipe, always=dtype == "fp8")
        if dtype != "bf16":
            self.model.set_fp8(self.layers)
        self.optimizer = FusedAdamW(
            self.model.parameters(),
            lr=self.training.learning_rate,
            betas=(0.9, 0.95),
            weight_decay=0.1,
            capturable=device.type == "cuda",
            copies=self.model.copies,
        )
        self._train_step = TrainStep(
            self.model, self.optimizer, max_grad_norm=1.0, dtype=torch.bfloat16
        )
        self._batches = TextBatches(self.training.batch, self.training.context, seed, device)
        self.losses: list[float] = []
        self.seconds = 0.0

    @property
    def done(self) -> bool:
        diverged = bool(self.losses) and not math.isfinite(self.losses[-1])
        return diverged or len(self.losses) == self.training.steps

    def train(self, until: float, checkpoint: Path) -> None:
        """Train to the end, or until a time; the state is saved now and then."""
        saved = began = time.monotonic()
        pending: list[Tensor] = []
        while not self.done and time.monotonic() < until:
            pending.append(self._step(len(self.losses) + len(pending)))
            # Reading a loss waits for the device.
            at_end = len(self.losses) + len(pending) == self.training.steps
            if len(pending) == 20 or at_end:
                self.losses += torch.stack(pending).tolist()
                pending.clear()
            if time.monotonic() - saved > _SAVED_EVERY_S and not pending:
                self.seconds, began = self.seconds + time.monotonic() - began, time.monotonic()
                self.save(checkpoint)
                saved = time.monotonic()
        self.losses += [float(loss) for loss in pending]
        self.losses = list(_until_divergence(self.losses))
        self.seconds += time.monotonic() - began

    def _step(self, index: int) -> Tensor:
        for group in self.optimizer.param_groups:
            group["lr"] = self.training.learning_rate * _schedule(index, self.training.steps)
        return self._train_step(self._batches(index))

    def save(self, path: Path) -> None:
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "losses": self.losses,
            "seconds": self.seconds,
        }
        temporary = path.with_suffix(".tmp")
        torch.save(state, temporary)
        os.replace(temporary, path)

    def load(self, path: Path) -> None:
        state = torch.load(path, map_location=self._device, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.losses, self.seconds = state["losses"], state["seconds"]

    def line(self) -> dict[str, Any]:
        """Return the result as a line of the file. A loss that is not finite ends the list."""
        finite = [loss for loss in self.losses if math.isfinite(loss)]
        decisions = self.layers.decisions
        return {
            "model": self.name,
            "dtype": self.dtype,
            "seed": self.seed,
            "recipe": "" if self.dtype == "bf16" else str(self.layers.recipe),
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "fp8_weights": sum(reason is None for reason in decisions.values()),
            "step": self._train_step.explain(),
            "left_out": {name: why for name, why in decisions.items() if why is not None},
            "steps": self.training.steps,
            "batch": self.training.batch,
            "context": self.training.context,
            "diverged_at": len(finite) + 1 if len(finite) < len(self.losses) else None,
            "losses": [round(loss, 5) for loss in finite],
            "seconds": round(self.seconds, 1),
            "text_sha256": hashlib.sha256(library_text()).hexdigest()[:16],
        }


def _schedule(index: int, steps: int) -> float:
    warmup = max(1, round(_WARMUP * steps))
    if index < warmup:
        return (index + 1) / warmup
    return 0.55 + 0.45 * math.cos(math.pi * (index - warmup) / max(1, steps - warmup))


def _until_divergence(losses: Sequence[float]) -> Iterator[float]:
    for loss in losses:
        yield loss
        if not math.isfinite(loss):
            return


def read(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["small", "300m"])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["bf16", "fp8"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="of each model")
    parser.add_argument("--scaling", default="tensorwise")
    parser.add_argument("--out", type=Path, default=Path("fp8-learning.jsonl"))
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--time-limit", type=float, default=math.inf, help="seconds")
    parser.add_argument("--device", default="auto")
    options = parser.parse_args(arguments)
    until = time.monotonic() + options.time_limit
    if options.out.exists() and not options.resume:
        print(f"{options.out} exists: add --resume, or name another file")
        return 2
    device = pick_device(options.device)
    recipe = Recipe(options.scaling)
    if {*options.dtypes} - {"bf16"} and (reason := unavailable(device.torch_device, recipe)):
        print(f"no FP8 training here: {reason}")
        return 2
    here = describe(device)
    where = {"device": here.device_name, "torch": here.torch, "commit": here.commit}
    finished = {(one["model"], one["dtype"], one["seed"]) for one in read(options.out)}
    # Pairs stay together: a file that is not complete can be read already.
    wanted = [
        (model, dtype, seed)
        for model in options.models
        for seed in options.seeds
        for dtype in options.dtypes
        if (model, dtype, seed) not in finished
    ]
    for at, (model, dtype, seed) in enumerate(wanted):
        checkpoint = options.out.with_suffix(f".{model}-{dtype}-{seed}.pt")
        run = Run(model, dtype, seed, recipe, device.torch_device)
        if checkpoint.exists():
            run.load(checkpoint)
        run.train(until, checkpoint)
        if not run.done:
            run.save(checkpoint)
            print(f"{model} {dtype} seed {seed}: {len(run.losses)} of {run.training.steps} steps;")
            print(f"{len(wanted) - at} trainings left: run again with --resume")
            return 3
        with options.out.open("a") as file:
            file.write(json.dumps(run.line() | where) + "\n")
        checkpoint.unlink(missing_ok=True)
        print(f"{model} {dtype} seed {seed}: {run.losses[-1]:.4f} after {run.seconds:.0f} s")
        del run
        device.release()
    return 0


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except StepscopeError as error:
        raise SystemExit(str(error)) from error
