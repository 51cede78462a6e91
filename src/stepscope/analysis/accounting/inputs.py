"""Inputs of the calculations: flags, symbols, units and checks of the mesh."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from stepscope.errors import UsageError

_MOST = 1e15
_SHARDED = {
    "tokens": "tokens of the batch",
    "batch": "sequences of the batch",
    "d_ff": "columns of d_ff",
    "layers": "layers",
}


class Inputs(msgspec.Struct, frozen=True, kw_only=True):
    """Values of a calculation; those that it does not take stay 1."""

    batch: int = 1
    context: int = 1
    d_model: int = 1
    d_ff: int = 1
    layers: int = 1
    vocab: int = 1
    ranks: int = 1
    dp: int = 1
    fsdp: int = 1
    tp: int = 1
    pp: int = 1
    microbatches: int = 1
    fsdp_axes: int = 1
    tp_axes: int = 1
    message_mb: float = 1.0
    buckets: int = 1
    overhead_us: float = 1.0
    device_gb: float = 1.0
    gpu_gb: float = 1.0
    bandwidth_gbs: float = 1.0
    tflops: float = 1.0

    @classmethod
    def of(
        cls, name: str, defaults: Mapping[str, float], given: Mapping[str, float | None]
    ) -> Inputs:
        """Combine defaults and given values, checked; a value that is not taken is an error."""
        chosen: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
        for key in chosen:
            if key not in defaults:
                taken = ", ".join(f"--{field.replace('_', '-')}" for field in defaults)
                raise UsageError(
                    f"{name} does not depend on --{key.replace('_', '-')}", f"it takes {taken}"
                )
        inputs = cls(**{**defaults, **chosen})
        inputs._check()
        return inputs

    def _check(self) -> None:
        for field in self.__struct_fields__:
            value = getattr(self, field)
            flag = f"--{field.replace('_', '-')}"
            if not 0 < value < _MOST:
                raise UsageError(f"{flag} is {value:g}", f"it must be above 0 and below {_MOST:g}")

    def divide(self, field: str, total: str) -> None:
        """Check that an axis of the mesh divides what it shards."""
        ways, size = getattr(self, field), getattr(self, total)
        if size % ways:
            raise UsageError(
                f"--{field} {ways} does not divide the {size:,} {_SHARDED[total]}",
                "choose a mesh whose axes divide what they shard",
            )

    @property
    def tokens(self) -> int:
        return self.batch * self.context


class Symbol(NamedTuple):
    """A symbol of the formulas and where its value comes from."""

    unit: str
    meaning: str
    value: Callable[[Inputs], float]


def _rational(value: float) -> float:
    """An int where it is one, so that formulas stay exact."""
    return int(value) if value == int(value) else value


SYMBOLS = {
    "B": Symbol("tokens", "tokens in the batch: --batch × --context", lambda i: i.tokens),
    "D": Symbol("", "width of the model: --d-model", lambda i: i.d_model),
    "D_FF": Symbol("", "width of the feed-forward layer: --d-ff", lambda i: i.d_ff),
    "L": Symbol("", "layers: --layers", lambda i: i.layers),
    "V": Symbol("", "vocabulary: --vocab", lambda i: i.vocab),
    "N": Symbol("devices", "devices of the ring: --ranks", lambda i: i.ranks),
    "N_DP": Symbol("devices", "data-parallel devices: --dp", lambda i: i.dp),
    "N_FSDP": Symbol("devices", "devices of the FSDP axis: --fsdp", lambda i: i.fsdp),
    "N_TP": Symbol("devices", "devices of the tensor-parallel axis: --tp", lambda i: i.tp),
    "N_PP": Symbol("devices", "pipeline stages: --pp", lambda i: i.pp),
    "M": Symbol("", "microbatches: --microbatches", lambda i: i.microbatches),
    "M_X": Symbol("", "mesh axes (links) of FSDP: --fsdp-axes", lambda i: i.fsdp_axes),
    "M_Y": Symbol("", "mesh axes (links) of TP: --tp-axes", lambda i: i.tp_axes),
    "S": Symbol("B", "size of the tensor: --message-mb", lambda i: _rational(i.message_mb * 1e6)),
    "n_b": Symbol("", "buckets: --buckets", lambda i: i.buckets),
    "o": Symbol("s", "overhead of a call: --overhead-us", lambda i: i.overhead_us / 1e6),
    "H": Symbol("B", "memory of a device: --device-gb", lambda i: _rational(i.device_gb * 1e9)),
    "G": Symbol("B", "memory of a GPU: --gpu-gb", lambda i: _rational(i.gpu_gb * 1e9)),
    "W": Symbol(
        "B/s",
        "bandwidth out of a device: --bandwidth-gbs",
        lambda i: _rational(i.bandwidth_gbs * 1e9),
    ),
    "C": Symbol(
        "FLOP/s", "compute rate of a device: --tflops", lambda i: _rational(i.tflops * 1e12)
    ),
}
