"""Model configuration: shapes and precisions. Imports without torch."""

from __future__ import annotations

import msgspec

from stepscope.errors import UsageError, unknown_name

MAX_LAYERS = 10_000
"""Work and memory of many analyses grow with the blocks, whose number may come from a file."""


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of a decoder-only Transformer LM."""

    d_model: int
    d_ff: int
    n_layers: int
    n_heads: int
    vocab: int = 10_000
    context: int = 512
    """Longest sequence; the rotary table has this many rows."""
    rope_theta: float = 10_000.0

    def __post_init__(self) -> None:
        for name in ("d_model", "d_ff", "n_layers", "n_heads", "vocab", "context"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}", "it must be at least 1")
        if self.n_layers > MAX_LAYERS:
            raise UsageError(f"n_layers is {self.n_layers}", f"it must be at most {MAX_LAYERS:,}")
        if self.d_model % self.n_heads:
            raise UsageError(
                f"n_heads {self.n_heads} does not divide d_model {self.d_model}",
                "choose a number of heads that divides it",
            )
        if self.d_head % 2:
            raise UsageError(
                f"d_model {self.d_model} over n_heads {self.n_heads} gives heads of {self.d_head}",
                "rotary embedding pairs the dimensions of a head, so it must be even",
            )

    @property
    def d_head(self) -> int:
        return self.d_model // self.n_heads


WIDTHS = {"float32": 4, "tf32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a value of each dtype; tf32 is float32 in memory."""


class Precision(msgspec.Struct, frozen=True):
    """The dtype of the weights, the dtype of the matmuls, and how the two are combined."""

    name: str
    weights: str
    compute: str
    """Dtype of the matmuls."""
    help: str
    master: bool = False
    """The optimizer keeps a float32 copy of the weights and updates that one."""
    narrow_stream: bool = False
    """The residual stream has the dtype of the matmuls, not that of the weights."""
    fp8: bool = False
    """Linear layers of the blocks that gain from it run in FP8; all other matmuls in `compute`."""

    @property
    def autocast(self) -> bool:
        return WIDTHS[self.compute] < WIDTHS[self.weights]

    @property
    def fastest(self) -> str:
        """The dtype of its fastest matmuls; it names the ceiling that the step is compared with."""
        return "fp8" if self.fp8 else self.compute

    @property
    def stream(self) -> str:
        return self.compute if self.narrow_stream else self.weights


_F32, _BF16 = "float32", "bfloat16"
_IN_FP8 = "linear layers of the blocks in FP8"
PRECISIONS: dict[str, Precision] = {
    one.name: one
    for one in (
        Precision("float32", _F32, _F32, "all in float32, tensor cores off"),
        Precision("tf32", _F32, "tf32", "float32 storage, matmuls on tensor cores in TF32"),
        Precision("bfloat16", _F32, _BF16, "float32 weights, bfloat16 autocast"),
        Precision(
            "bfloat16-stream", _F32, _BF16,
            "float32 weights, bfloat16 autocast, the residual stream in bfloat16 too",
            narrow_stream=True,
        ),
        Precision(
            "float16", _F32, "float16", "float32 weights, float16 autocast with loss scaling"
        ),
        Precision(
            "bfloat16-pure", _BF16, _BF16, "weights, gradients and optimizer state in bfloat16"
        ),
        Precision(
            "bfloat16-master", _BF16, _BF16,
            "bfloat16 weights and gradients, float32 master weights and optimizer state",
            master=True,
        ),
        Precision("fp8", _F32, _BF16, f"bfloat16 autocast, {_IN_FP8}", fp8=True),
        Precision(
            "fp8-stream", _F32, _BF16, "the same with the residual stream in bfloat16",
            narrow_stream=True, fp8=True,
        ),
        Precision(
            "fp8-pure", _BF16, _BF16,
            "weights, gradients and optimizer state in bfloat16, linear layers in FP8", fp8=True,
        ),
    )
}  # fmt: skip

_ALIASES = {
    "fp32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "bf16-stream": "bfloat16-stream",
    "bf16-pure": "bfloat16-pure",
    "bf16-master": "bfloat16-master",
}


def precision(name: str) -> Precision:
    """Return the precision of that name; short names such as bf16 are accepted."""
    full = _ALIASES.get(name, name)
    if full not in PRECISIONS:
        raise unknown_name("dtype", name, PRECISIONS)
    return PRECISIONS[full]
