"""`stepscope.accelerate` and `stepscope.TrainStep` against torch.compile and Liger, in one process.

    python benchmarks/acceleration.py --out acceleration.jsonl      all rows and forms
    python benchmarks/acceleration.py --rows gpt2 --forms plain compile stepscope
    python benchmarks/acceleration.py --loss-steps 300     loss and gradients instead of times
    python benchmarks/acceleration.py --tiny               sizes for a CPU

Every form trains the same model from the same seed under bfloat16 autocast. A block is at least
`--seconds` of consecutive steps; forms take turns in ABBA order, and the time of a block is the
median of its steps. Energy is the counter of the device over a block. A form is built again for
each of its blocks if the memory does not hold all. Models have random weights; a row or form whose
library is missing is skipped with the reason.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from acceleration_rows import ROWS, SEED, Data, Row
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from stepscope.errors import first_cause, one_line
from stepscope.measure.device import pick_device
from stepscope.measure.environment import describe

os.environ.setdefault("HF_HUB_OFFLINE", "1")

COMPILED = ("compile-blocks", "compile", "compile-reduce-overhead")
CUDNN = "-cudnn"
"""Ending of a form in which torch prefers cuDNN's attention."""
PEERS = ("plain", *COMPILED, *(form + CUDNN for form in COMPILED), "liger")
_WITH_PASSES = {"form": "compiled with passes"}
OURS: dict[str, Any] = {
    "stepscope": "auto",
    "stepscope-eager": "auto",
    "stepscope-uncompiled": False,
    "stepscope-own-layers": False,
    "stepscope-compile-passes": _WITH_PASSES,
    "stepscope-compile-one-region": _WITH_PASSES | {"regions": False},
    "stepscope-compile-passes-update-after": _WITH_PASSES,
    "stepscope-compile-passes-no-copies": (
        _WITH_PASSES | {"passes": ("head and loss", "attention")}
    ),
    "stepscope-compile-fp8": _WITH_PASSES,
}
"""Forms of Stepscope, with the argument `compile` of `accelerate`: the form chosen by time, the
same without a CUDA graph, the model as it is, a `TransformerLM` with its own fused layers, the one
with all passes, that one without a region per block, with one update after the backward pass or
without copies of weights, and in FP8."""
FORMS = (*PEERS, *OURS)
LR = 3e-4
LEARNED_TOKENS = 4096
"""Distinct tokens of the data on which losses are compared. Some hundred steps see every token of a
large vocabulary only a few times: then the loss falls late and steeply, and any rounding moves that
point."""
LOSS_MEANS = 25
"""Steps of a mean in the recorded curves."""
WARM_UP = 8
"""Steps before the first block: compilation, autotuning, warm-up and capture of graphs."""
TRIAL = 72
"""Steps before the first block of a form that is chosen by time: up to six candidates."""
LEAD_IN = 3
"""Steps before a block is timed, of the same energy."""
FULL = 0.85
"""Share of the device memory above which forms that are not measured are freed."""

LossFunction = Callable[[nn.Module, Any], Tensor]


class SkippedError(Exception):
    """A row or form that cannot run here; the message says why."""


def loss_of_logits(model: nn.Module, batch: Any) -> Tensor:
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


def loss_function(row: Row) -> LossFunction | None:
    """Return the loss of logits; None if the model returns its loss."""
    return loss_of_logits if row.family in ("own", "logits", "vit") else None


class EagerStep:
    """The loop of PyTorch's documentation."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, loss_fn: LossFunction | None,
        device: torch.device, *, marks: bool = False,
    ) -> None:  # fmt: skip
        self._model, self._optimizer, self._loss_fn = model, optimizer, loss_fn
        self._device, self._marks = device, marks

    def __call__(self, batch: Any) -> Tensor:
        if self._marks:
            torch.compiler.cudagraph_mark_step_begin()
        with torch.autocast(self._device.type, torch.bfloat16):
            loss = compute_loss(self._model, batch, self._loss_fn)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss.detach()


def compute_loss(model: nn.Module, batch: Any, loss_fn: LossFunction | None) -> Tensor:
    if loss_fn is not None:
        return loss_fn(model, batch)
    return model(**batch).loss if isinstance(batch, dict) else model(*batch)  # type: ignore[no-any-return]


class Bench:
    """One row on this device."""

    def __init__(self, row: Row, args: argparse.Namespace, tokens: int | None = None) -> None:
        self.row, self.args, self.device = row, args, torch.device(args.device)
        self.shape = row.tiny if args.tiny else row.shape
        self.data = Data(row, self.shape, self.device, tokens)

    def model(self, native: bool = False) -> nn.Module:
        torch.manual_seed(SEED)
        try:
            # Random weights of a large model take long on the host.
            with self.device:
                plain = self.row.build(self.args.tiny)
        except (ImportError, RuntimeError) as error:
            # A library that does not match the version of torch raises when it is imported.
            raise SkippedError(first_cause(error)) from error
        if native:
            from stepscope.attention import attention
            from stepscope.model import TransformerLM

            assert isinstance(plain, TransformerLM)
            fast = TransformerLM(
                plain.config, attention=attention, fused=True, fused_projections=True
            )
            fast.load_state_dict(plain.state_dict())
            plain = fast
        return plain.to(self.device).train()

    def step(self, form: str) -> Callable[[Any], Tensor]:
        """Build the model and the step of a form."""
        if form in OURS:
            return self._our_step(form)
        if form.endswith(CUDNN):
            return _with_cudnn(self.step(form.removesuffix(CUDNN)))
        model, loss_fn = self.model(), loss_function(self.row)
        if form == "liger":
            if len(self.args.forms) > 1:
                raise SkippedError("Liger patches classes, which changes other forms: run it alone")
            _apply_liger(model, self.row)
        elif form == "compile-blocks":
            _compile_blocks(model)
        elif form == "compile":
            model.compile()
        elif form == "compile-reduce-overhead":
            model.compile(mode="reduce-overhead")
        marks = form == "compile-reduce-overhead"
        return EagerStep(model, self._adamw(model), loss_fn, self.device, marks=marks)

    def _our_step(self, form: str) -> Callable[[Any], Tensor]:
        import stepscope

        dtype = "fp8" if form.endswith("-fp8") else None
        if form == "stepscope-own-layers":
            return self._own_layers_step()
        model, loss_fn = self.model(), loss_function(self.row)
        optimizer = self._adamw(model)
        stepscope.accelerate(model, optimizer, compile=OURS[form], dtype=dtype)
        return stepscope.TrainStep(
            model, optimizer, loss_fn=loss_fn, dtype=torch.bfloat16,
            graph="off" if form == "stepscope-eager" else "auto",
            update_in_backward=False if form.endswith("-update-after") else "auto",
        )  # fmt: skip

    def _own_layers_step(self) -> Callable[[Any], Tensor]:
        import stepscope
        from stepscope.optim import InBackwardAdamW

        if self.row.family != "own":
            raise SkippedError("only TransformerLM has fused layers of its own")
        model = self.model(native=True)
        optimizer = InBackwardAdamW(model.parameters(), lr=LR, copies=model.copies)  # type: ignore[arg-type]
        return stepscope.TrainStep(model, optimizer, dtype=torch.bfloat16)

    def _adamw(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=LR, fused=True)


def _with_cudnn(step: Callable[[Any], Tensor]) -> Callable[[Any], Tensor]:
    """Return the step with cuDNN's attention first, in the order in which torch tries them."""
    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION,
             SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]  # fmt: skip

    def run(batch: Any) -> Tensor:
        with sdpa_kernel(order, set_priority=True):
            return step(batch)

    return run


def _apply_liger(model: nn.Module, row: Row) -> None:
    if row.family != "hf":
        raise SkippedError("Liger patches Hugging Face models")
    try:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
    except ImportError as error:
        raise SkippedError(str(error)) from error
    if model.config.model_type not in MODEL_TYPE_TO_APPLY_LIGER_FN:  # type: ignore[union-attr]
        raise SkippedError(f"Liger has no patch for {model.config.model_type}")  # type: ignore[union-attr]
    _apply_liger_kernel_to_instance(model=model)


def _compile_blocks(model: nn.Module) -> None:
    from stepscope.acceleration.changes import blocks_of

    blocks = blocks_of(model)
    if not blocks:
        # timm has its blocks in a Sequential.
        blocks = [block for child in model.children() for block in _sequential(child)]
    if not blocks:
        raise SkippedError("the model has no repeated blocks")
    for block in blocks:
        block.compile()


def _sequential(module: nn.Module) -> list[nn.Module]:
    return list(module) if isinstance(module, nn.Sequential) and len(module) > 1 else []


class Built:
    """A form that is alive, with the memory that it needed."""

    def __init__(self, bench: Bench, form: str) -> None:
        self._bench = bench
        on_gpu = bench.device.type == "cuda"
        self.gib: dict[str, float] = {}
        if on_gpu:
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        started = time.perf_counter()
        self.step = bench.step(form)
        self.made_s = time.perf_counter() - started
        self._batches = [bench.data.batch(number) for number in range(4)]
        started = time.perf_counter()
        self._run(1)
        synchronize(bench.device)
        self.first_step_s = time.perf_counter() - started
        warm_up = TRIAL if OURS.get(form) == "auto" else WARM_UP
        self._run(0 if bench.args.tiny else warm_up - 1)
        synchronize(bench.device)
        self.build_s = time.perf_counter() - started
        if on_gpu:
            self.gib = {
                "peak_gib": (torch.cuda.max_memory_allocated() - allocated) / 2**30,
                "reserved_gib": (torch.cuda.max_memory_reserved() - reserved) / 2**30,
            }
            torch.cuda.empty_cache()
            self.resident = torch.cuda.memory_reserved() - reserved
            """Bytes between steps, with the memory of CUDA graphs."""

    def _run(self, steps: int) -> list[float]:
        """Run consecutive steps without waiting for them; return the milliseconds of each."""
        clock = _EventClock() if self._bench.device.type == "cuda" else _HostClock()
        for number in range(steps):
            self.step(self._batches[number % len(self._batches)])
            clock.mark()
        return clock.milliseconds()

    def block(self, seconds: float) -> list[float]:
        """Run a block, after steps that bring the device to the state of consecutive steps."""
        lead_in = self._run(LEAD_IN)
        each = max(statistics.median(lead_in) / 1e3, 1e-6)
        return self._run(max(5, math.ceil(seconds / each)))


class _EventClock:
    def __init__(self) -> None:
        self._events: list[torch.cuda.Event] = []
        self.mark()

    def mark(self) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append(event)

    def milliseconds(self) -> list[float]:
        torch.cuda.synchronize()
        pairs = zip(self._events, self._events[1:], strict=False)
        return [before.elapsed_time(after) for before, after in pairs]


class _HostClock:
    def __init__(self) -> None:
        self._times = [time.perf_counter()]

    def mark(self) -> None:
        self._times.append(time.perf_counter())

    def milliseconds(self) -> list[float]:
        pairs = zip(self._times, self._times[1:], strict=False)
        return [1e3 * (after - before) for before, after in pairs]


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


class Turns:
    """The forms of a row, measured in ABBA order."""

    def __init__(self, bench: Bench, forms: Sequence[str]) -> None:
        self._bench, self._forms = bench, forms
        self._alive: dict[str, Built] = {}
        self._largest = 0.0

    def lines(
        self, known: Collection[int] = (), deadline: float = math.inf
    ) -> Iterator[dict[str, Any]]:
        """Yield a line per block, without those that are known; none begins after the deadline."""
        skipped: set[str] = set()
        for number, form in enumerate([*self._forms, *reversed(self._forms)]):
            if form in skipped or number in known or time.monotonic() > deadline:
                continue
            line = {"row": self._bench.row.name, "form": form, "block": number}
            try:
                yield line | self._measure(form)
            except Exception as error:
                # A form that fails, also for memory, leaves the others to be measured.
                skipped.add(form)
                self._alive.pop(form, None)
                reason = str(error) if isinstance(error, SkippedError) else one_line(error)
                yield line | {"skipped": reason}
        self._alive.clear()
        self._free()

    def _measure(self, form: str) -> dict[str, Any]:
        built = self._alive.get(form)
        if built is None:
            self._make_room()
            built = self._alive[form] = Built(self._bench, form)
            self._largest = max(self._largest, built.gib.get("reserved_gib", 0.0))
        device = pick_device(self._bench.device.type)
        others = self._reset_peak(built)
        before = device.energy_j()
        samples = built.block(self._bench.args.seconds)
        after = device.energy_j()
        energy = {}
        if before is not None and after is not None:
            energy["joules"] = (after - before) / (len(samples) + LEAD_IN)
        explain = getattr(built.step, "explain", None)
        return {
            "median_ms": statistics.median(samples),
            "steps": len(samples),
            "quartiles_ms": statistics.quantiles(samples, n=4)[::2],
            "made_s": built.made_s,
            "first_step_s": built.first_step_s,
            "build_s": built.build_s,
            **built.gib,
            **self._steps_gib(others),
            **energy,
            **({} if explain is None else {"explain": explain()}),
        }

    def _reset_peak(self, built: Built) -> int:
        """Begin to measure the peak of a block, without what was needed to build the form; return
        the bytes of the other forms."""
        if self._bench.device.type != "cuda":
            return 0
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_reserved() - built.resident

    def _steps_gib(self, others: int) -> dict[str, float]:
        if self._bench.device.type != "cuda":
            return {}
        return {"steps_gib": (torch.cuda.max_memory_reserved() - others) / 2**30}

    def _make_room(self) -> None:
        if self._bench.device.type != "cuda":
            return
        free, total = torch.cuda.mem_get_info()
        if total - free + self._largest * 2**30 > FULL * total or not self._largest:
            self._alive.clear()
            self._free()

    @staticmethod
    def _free() -> None:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Write the median of each form's blocks, with its ratio to the best peer."""
    out = [f"{'row':20} {'form':26} {'step':>10} {'vs peer':>8} {'memory':>10}  note"]
    for row in dict.fromkeys(line["row"] for line in lines):
        of_row = [line for line in lines if line["row"] == row]
        times = {
            form: statistics.median(
                line["median_ms"] for line in of_row if line["form"] == form and "median_ms" in line
            )
            for form in dict.fromkeys(line["form"] for line in of_row if "median_ms" in line)
        }
        best = min((ms for form, ms in times.items() if form in PEERS), default=math.nan)
        for form in dict.fromkeys(line["form"] for line in of_row):
            mine = [line for line in of_row if line["form"] == form]
            note = next((line["skipped"] for line in mine if "skipped" in line), "")
            note = note or next((line["explain"] for line in mine if "explain" in line), "")
            peak = max((line.get("steps_gib", 0.0) for line in mine), default=0.0)
            ms, memory = times.get(form), f"{peak:.2f} GiB" if peak else "-"
            step, ratio = ("-", "-") if ms is None else (f"{ms:.3f} ms", f"{best / ms:.3f}x")
            out.append(f"{row:20} {form:26} {step:>10} {ratio:>8} {memory:>10}  {note}")
    return "\n".join(out)


def compare_losses(bench: Bench, steps: int) -> dict[str, Any]:
    """Train plain and accelerated from the same seed on the same batches."""
    last = min(50, steps)
    gradients: list[dict[str, Tensor]] = []
    means, curves = [], []
    for ours in (False, True):
        gradients.append(_first_gradients(bench, ours))
        step = bench.step("stepscope" if ours else "plain")
        losses = torch.stack([step(bench.data.batch(number)) for number in range(steps)]).float()
        means.append(losses[-last:].mean().item())
        curves.append([round(part.mean().item(), 5) for part in losses.split(LOSS_MEANS)])
        del step
        Turns._free()
    plain, fast = gradients
    errors = {
        name: ((fast[name] - plain[name]).norm() / plain[name].norm().clamp_min(1e-30)).item()
        for name in plain
    }
    worst = max(errors, key=errors.__getitem__)
    return {
        "row": bench.row.name,
        "loss_steps": steps,
        "plain_loss": means[0],
        "stepscope_loss": means[1],
        "relative_difference": (means[1] - means[0]) / means[0],
        "plain_losses": curves[0],
        "stepscope_losses": curves[1],
        "largest_gradient_error": errors[worst],
        "largest_gradient_error_of": worst,
    }


def _first_gradients(bench: Bench, ours: bool) -> dict[str, Tensor]:
    """Return the gradients of the first batch, on the host."""
    model, loss_fn = bench.model(), loss_function(bench.row)
    if ours:
        import stepscope

        stepscope.accelerate(model)
    with torch.autocast(bench.device.type, torch.bfloat16):
        loss = compute_loss(model, bench.data.batch(0), loss_fn)
    loss.backward()  # type: ignore[no-untyped-call]
    return {
        name: parameter.grad.detach().float().cpu()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--seconds", type=float, default=4.0, help="length of a block")
    parser.add_argument("--loss-steps", type=int, default=0, help="compare losses instead")
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="file for one JSON line per block")
    return parser.parse_args(words)


def records(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for name in args.rows:
        if not args.loss_steps:
            yield from Turns(Bench(ROWS[name], args), args.forms).lines()
            continue
        try:
            yield compare_losses(Bench(ROWS[name], args, LEARNED_TOKENS), args.loss_steps)
        except SkippedError as error:
            yield {"row": name, "skipped": str(error)}


def _has_compiled_kernels() -> bool:
    """Return whether Triton's cache on disk has kernels: a first step compiles those it lacks."""
    from triton import knobs

    folder = Path(knobs.cache.dir)
    return folder.is_dir() and any(folder.iterdir())


def written(args: argparse.Namespace, records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the lines; print each when it is measured, and append it to `--out` with what it was
    measured on."""
    machine = {
        "device": torch.cuda.get_device_name() if args.device.startswith("cuda") else "cpu",
        "torch": torch.__version__,
        "commit": describe(pick_device(torch.device(args.device).type)).commit,
        "triton_cache": "filled" if _has_compiled_kernels() else "empty",
        "tiny": args.tiny,
        "seconds": args.seconds,
    }
    lines = []
    with args.out.open("a") if args.out else contextlib.nullcontext() as file:
        for line in records:
            lines.append(line)
            print(json.dumps(line), file=sys.stderr, flush=True)
            if file is not None:
                file.write(json.dumps(line | machine) + "\n")
                file.flush()
    return lines


def main(words: Sequence[str] | None = None) -> None:
    args = parse(words)
    lines = written(args, records(args))
    if args.loss_steps:
        for line in lines:
            print("  ".join(f"{name} {value}" for name, value in line.items()))
    else:
        print(table(lines))


if __name__ == "__main__":
    main()
