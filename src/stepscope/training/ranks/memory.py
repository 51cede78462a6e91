"""Refuses a case whose predicted memory exceeds what is available. Loads without torch.

A rank has its largest wrapper and, on the CPU, the parameters of one process to compare with. The
prediction is that of `stepscope predict`, with the buffers that wrappers add.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from stepscope.analysis.predict.fit import MARGIN
from stepscope.analysis.predict.plan import StepPlan
from stepscope.analysis.predict.step import predict
from stepscope.errors import UsageError
from stepscope.model.config import precision
from stepscope.model.cost import parameters
from stepscope.model.sizes import SIZES
from stepscope.records.memory import PARAMETERS
from stepscope.report.format import bytes_
from stepscope.training.case import CaseSkipped
from stepscope.training.ranks.cases import is_follower, torchrun_size
from stepscope.training.ranks.subject import RankedStep

if TYPE_CHECKING:
    from stepscope.measure.device import Device

PROCESS_BYTES = {"cpu": 800 << 20, "cuda": 2 << 30}
"""Memory of a rank besides its tensors: torch, the group's buffers; on a GPU CUDA's context, its
libraries and the buffers of NCCL."""
_AVAILABLE_SHARE = 0.95
_SHORTEST_CONTEXT = 32


class Need(NamedTuple):
    """Predicted bytes of a rank."""

    device: int
    host: int
    """Of the host's memory, if the device is a GPU."""


class Room(NamedTuple):
    """Available bytes: of each device and of the host."""

    device: int
    devices: int
    host: int

    def fits(self, need: Need, ranks: int) -> bool:
        return need.device * self.sharing(ranks) <= self.device and need.host * ranks <= self.host

    def sharing(self, ranks: int) -> int:
        """Most ranks on one device."""
        return -(-ranks // self.devices)


class Kind(NamedTuple):
    """How the wrappers of a study use memory."""

    fused: bool = False
    """AdamW in one kernel."""
    slices: bool = False
    """A wrapper flattens all gradients to reduce-scatter them."""


def need_of(
    case: RankedStep, device: Literal["cpu", "cuda"], kind: Kind, *, gloo: bool = True
) -> Need:
    """Predict the memory of the largest wrapper of a case on each rank."""
    shape = case.shape
    assert shape is not None
    prediction = predict(
        StepPlan(
            model=shape,
            batch=max(1, case.batch // case.ranks),
            context=case.context,
            dtype=getattr(case, "dtype", "float32"),
            attention="auto",
            optimizer="torch-fused" if kind.fused else "torch",
            device=device,
            used_before=True,
        )
    )
    weights = prediction.phases[0].lines[PARAMETERS]
    peaks = {moment.phase: moment.allocated for moment in prediction.phases}
    # Buckets exist before the gradients, which then are views of them; flat gradients are copied.
    peak = max(size + weights * (phase != "optimizer") for phase, size in peaks.items())
    if kind.slices:
        # Weights, gradients and flattened gradients, which gloo copies; this rank's part of the
        # gradients, of the two moments and of the new weights.
        peak = max(peak, int(weights * (3 + gloo + 4 / case.ranks)))
    own = int(MARGIN * peak) + PROCESS_BYTES[device]
    if device == "cpu":
        return Need(own + weights, 0)
    return Need(own, weights + PROCESS_BYTES["cuda"])


def least_need(parameter_bytes: int, trained_bytes: int, device: str) -> Need:
    """The same without activations, for a model whose step cannot be predicted."""
    own = parameter_bytes + 4 * trained_bytes + PROCESS_BYTES[device]
    if device == "cpu":
        return Need(own + parameter_bytes, 0)
    return Need(own, parameter_bytes + PROCESS_BYTES["cuda"])


def room_of(device: Device) -> Room:
    """Memory available on this machine."""
    host = available_host_memory()
    if device.kind != "cuda":
        return Room(host, 1, host)
    import torch

    gpus = torch.cuda.device_count()
    free = min(torch.cuda.mem_get_info(gpu)[0] for gpu in range(gpus))
    return Room(int(_AVAILABLE_SHARE * free), gpus, host)


def available_host_memory() -> int:
    """Memory that processes may still take, of the machine and of this container."""
    import psutil

    available = int(psutil.virtual_memory().available)
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            group = Path("/sys/fs/cgroup")
            left = int((group / limit).read_text()) - int((group / used).read_text())
        except (OSError, ValueError):
            continue
        available = min(available, max(0, left))
    return int(_AVAILABLE_SHARE * available)


def require_memory(case: RankedStep, device: Device, kind: Kind) -> None:
    """Skip a case that is predicted not to fit, with the flag that makes it fit."""
    if is_follower():
        # The leader decides for all.
        return
    room = room_of(device)
    name: Literal["cpu", "cuda"] = "cuda" if device.kind == "cuda" else "cpu"

    def need(case: RankedStep) -> Need:
        if case.own:
            return _least_of_own(case, name)
        shared = room.sharing(ranks_here(case)) > 1
        return need_of(case, name, kind, gloo=shared or case.backend == "gloo")

    own = need(case)
    if room.fits(own, ranks_here(case)):
        return
    changes = (
        f"; {words} fits"
        for words, changed in smaller(case)
        if room.fits(need(changed), ranks_here(changed))
    )
    raise CaseSkipped(_refusal(case, own, room) + next(changes, ""))


def ranks_here(case: RankedStep) -> int:
    """Ranks on this machine."""
    return int(os.environ["LOCAL_WORLD_SIZE"]) if torchrun_size() else case.ranks


def _refusal(case: RankedStep, need: Need, room: Room) -> str:
    ranks, where, each, available = ranks_here(case), "of host memory", need.host, room.host
    if need.device * room.sharing(ranks) > room.device:
        ranks, each, available = room.sharing(ranks), need.device, room.device
        where = "on a GPU" if need.host else where
    least = "at least " * bool(case.own)
    processes = "1 rank needs" if ranks == 1 else f"{ranks} ranks need"
    return (
        f"{processes} {least}{bytes_(ranks * each)} {where} by the prediction, and"
        f" {bytes_(available)} are available"
    )


def smaller(case: RankedStep) -> Iterator[tuple[str, RankedStep]]:
    """Cases that need less memory, the least different first, with their flags."""
    shape = case.shape
    if case.batch > case.ranks:
        yield f"--batch {case.ranks}", msgspec.structs.replace(case, batch=case.ranks)
    if shape is None:
        return
    context = case.context // 2
    while context >= _SHORTEST_CONTEXT:
        yield f"--context {context}", msgspec.structs.replace(case, context=context)
        context //= 2
    dtype = getattr(case, "dtype", "")
    if dtype and precision(dtype).weights == "float32":
        yield "--dtype bfloat16-pure", msgspec.structs.replace(case, dtype="bfloat16-pure")
    for ranks in range(case.ranks - 1, 1, -1) if not torchrun_size() else ():
        if case.batch % ranks == 0:
            yield f"--ranks {ranks}", msgspec.structs.replace(case, ranks=ranks)
    for size in reversed(_by_size(case.table)):
        changed = msgspec.structs.replace(case, size=size)
        with suppress(UsageError):
            other = changed.shape
            if other is not None and parameters(other).total < parameters(shape).total:
                yield f"--size {size}", changed


def _by_size(table: str) -> Sequence[str]:
    known = SIZES["tiny"] | SIZES[table]
    return sorted(known, key=lambda name: parameters(known[name]).total)


def _least_of_own(case: RankedStep, device: str) -> Need:
    """Build a user's model to count its bytes."""
    from stepscope.training.building import build

    sizes = [
        (p.numel() * p.element_size(), p.requires_grad) for p in build(case.own).model.parameters()
    ]
    return least_need(sum(s for s, _ in sizes), sum(s for s, on in sizes if on), device)
