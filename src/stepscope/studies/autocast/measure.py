"""Run one forward and backward pass under autocast and record every dtype."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from stepscope.records.schema import Quantity, Series
from stepscope.studies.autocast.cases import AutocastCase, OperatorDtypes
from stepscope.studies.base import Bench, Measurement

if TYPE_CHECKING:
    import torch
    from torch import nn

    from stepscope.measure.device import Device

_REDUCTIONS = ("float16", "bfloat16", "float32")
_SAMPLES = 5


def measure(case: AutocastCase, bench: Bench) -> Measurement:
    import torch

    from stepscope.measure.dtypes import DtypeRecorder

    device = bench.device
    torch.manual_seed(0)
    model, inputs, loss_of = _subject(case, device.torch_device)
    outputs, norm_inputs, unwatch = _watch_modules(model)
    dtype = getattr(torch, case.dtype)

    forward, backward = DtypeRecorder(), DtypeRecorder()
    with forward, torch.autocast(device.kind, dtype):
        logits = model(inputs)
    loss = loss_of(logits)
    with backward:
        loss.backward()  # type: ignore[no-untyped-call]
    unwatch()
    attachments: dict[str, Any] = {
        "formats": _named(model, outputs, logits, loss),
        "forward": _table(forward.operators),
        "backward": _table(backward.operators),
    }
    if device.kind != "cuda":
        attachments["cuda_formats"] = _by_rules_of_cuda(model, inputs, loss_of, dtype)
    bench.progress(1, 2, "casts")
    casts = forward.casts + backward.casts
    size = sum(
        count * math.prod(shape) * (_width(source) + _width(target))
        for (shape, source, target), count in casts.items()
    )
    return Measurement(
        series=(
            _timed("step", _step(model, inputs, loss_of, dtype, device.kind), device),
            _timed("casts", _replay(casts, device.torch_device), device),
        ),
        quantities=(
            Quantity(name="casts", value=float(sum(casts.values())), unit="1"),
            Quantity(name="cast_bytes", value=float(size), unit="B"),
            *_reduction_errors(norm_inputs),
        ),
        attachments=attachments,
    )


def _named(
    model: nn.Module, outputs: Mapping[str, str], logits: torch.Tensor, loss: torch.Tensor
) -> dict[str, str]:
    """Dtypes by name, after a backward pass."""
    return {
        "parameters": _of(p for p in model.parameters()),
        **outputs,
        "logits": _name(logits),
        "loss": _name(loss),
        "gradients": _of(p.grad for p in model.parameters() if p.grad is not None),
    }


def _by_rules_of_cuda(
    model: nn.Module,
    inputs: torch.Tensor,
    loss_of: Callable[[torch.Tensor], torch.Tensor],
    dtype: torch.dtype,
) -> dict[str, str]:
    """The dtypes that the same step has on CUDA, by the rules of its autocast."""
    from stepscope.measure.autocast_rules import CudaAutocast

    model.zero_grad()
    outputs, _, unwatch = _watch_modules(model)
    with CudaAutocast(dtype):
        logits = model(inputs)
    unwatch()
    loss = loss_of(logits)
    loss.backward()  # type: ignore[no-untyped-call]
    return _named(model, outputs, logits, loss)


def _subject(
    case: AutocastCase, device: torch.device
) -> tuple[nn.Module, torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
    """The small network of the course, or the model under study in a small size."""
    import torch
    from torch import nn

    from stepscope.attention.api import attention_with
    from stepscope.model.loss import cross_entropy
    from stepscope.model.sizes import find_size, with_overrides
    from stepscope.model.transformer import TransformerLM

    if case.subject == "toy":
        layers = {
            "fc1": nn.Linear(20, 10, bias=False),
            "relu": nn.ReLU(),
            "ln": nn.LayerNorm(10),
            "fc2": nn.Linear(10, 5, bias=False),
        }
        toy = nn.Sequential()
        for name, layer in layers.items():
            toy.add_module(name, layer)
        targets = torch.randint(5, (32,), device=device)
        return (
            toy.to(device),
            torch.randn(32, 20, device=device),
            lambda logits: nn.functional.cross_entropy(logits.float(), targets),
        )
    shape = with_overrides(find_size(case.subject), context=case.context, vocab=512)
    model = TransformerLM(shape, attention=attention_with(case.attention), device=device)
    tokens, targets = torch.randint(shape.vocab, (2, 2, case.context), device=device)
    return model, tokens, lambda logits: cross_entropy(logits, targets)


def _watch_modules(
    model: nn.Module,
) -> tuple[dict[str, str], list[torch.Tensor], Callable[[], None]]:
    """Record the dtype of every module's output, except for blocks after the first, and the inputs
    of norms; also returns a function that stops recording."""
    outputs: dict[str, str] = {}
    norm_inputs: list[torch.Tensor] = []
    handles: list[Any] = []

    def watch(name: str, module: nn.Module) -> None:
        def seen(_: Any, inputs: tuple[Any, ...], output: Any) -> None:
            if hasattr(output, "dtype"):
                outputs.setdefault(f"{name} output", _name(output))
            if "norm" in name or name == "ln":
                # Unchanged: a cast here would count as one of autocast's.
                norm_inputs.append(inputs[0])

        handles.append(module.register_forward_hook(seen))

    for name, module in model.named_modules():
        first = not name.startswith("blocks.") or name.startswith("blocks.0.")
        if name and first and name != "blocks.0.attention.rotary":
            watch(name, module)

    def stop() -> None:
        for handle in handles:
            handle.remove()

    return outputs, norm_inputs, stop


def _reduction_errors(norm_inputs: list[torch.Tensor]) -> Iterator[Quantity]:
    """Error of a norm's mean square with the sum in each dtype, against float64."""
    import torch

    for dtype in _REDUCTIONS:
        worst = 0.0
        for x in norm_inputs:
            rows = x.detach().flatten(0, -2)[:64].float().cpu()
            exact = rows.double().pow(2).mean(dim=-1)
            narrow = rows.to(getattr(torch, dtype))
            total = torch.zeros(len(rows), dtype=narrow.dtype)
            for column in (narrow * narrow).unbind(dim=-1):
                total += column
            mean = total.double() / rows.shape[-1]
            error = ((mean - exact) / exact).abs()
            worst = max(worst, float(error[torch.isfinite(error)].max()))
        yield Quantity(name="norm_error", variant=dtype, value=worst, unit="1")


def _step(
    model: nn.Module,
    inputs: torch.Tensor,
    loss_of: Callable[[torch.Tensor], torch.Tensor],
    dtype: torch.dtype,
    kind: str,
) -> Callable[[], None]:
    import torch

    def run() -> None:
        model.zero_grad()
        with torch.autocast(kind, dtype):
            logits = model(inputs)
        loss_of(logits).backward()  # type: ignore[no-untyped-call]

    return run


def _replay(
    casts: Mapping[tuple[tuple[int, ...], str, str], int], device: torch.device
) -> Callable[[], None]:
    """Replay all casts of a step, one after the other."""
    import torch

    casts_of_step = [
        (torch.zeros(shape, dtype=getattr(torch, source), device=device), getattr(torch, target), n)
        for (shape, source, target), n in casts.items()
    ]

    def run() -> None:
        for tensor, target, count in casts_of_step:
            for _ in range(count):
                tensor.to(target)

    return run


def _timed(name: str, run: Callable[[], None], device: Device) -> Series:
    from stepscope.measure.timer import Phase, time_step

    timing = time_step((Phase(name, run),), device, warmup=1, steps=_SAMPLES)
    series = min((s for s in timing.series if s.name == "step"), key=lambda s: s.clock)
    return msgspec.structs.replace(series, name=name)


def _table(
    operators: Mapping[tuple[str, tuple[str, ...], tuple[str, ...]], int],
) -> list[OperatorDtypes]:
    return [
        OperatorDtypes(operator=name, inputs=read, output=written, count=count)
        for (name, read, written), count in sorted(operators.items())
    ]


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _of(tensors: Any) -> str:
    return ", ".join(sorted({_name(tensor) for tensor in tensors}))


def _width(dtype: str) -> int:
    import torch

    return int(getattr(torch, dtype).itemsize)
