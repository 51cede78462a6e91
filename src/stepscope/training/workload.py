"""The training step that several studies measure: its case struct and its name. No torch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec

from stepscope.analysis.predict.plan import LOSSES, MODES, OPTIMIZERS, WITHIN_BACKWARD, Mode
from stepscope.attention.registry import implementation
from stepscope.errors import UsageError
from stepscope.kernels.activation_policy import ALL, check_layer_options, policy_per_layer
from stepscope.model import cost
from stepscope.model.checkpointing import NONE, recomputed_blocks, segment_sizes
from stepscope.model.config import ModelConfig, precision
from stepscope.records.schema import Quantity
from stepscope.training.case import Case
from stepscope.training.flag_checks import check_at_least, check_known
from stepscope.training.flags import COMPILE, COMPILE_MODES, WorkloadFlags
from stepscope.training.model_names import check_dtype, check_name
from stepscope.training.settings import unusual_settings
from stepscope.training.shape import model_shape, size_key, size_name


class Workload(Case, frozen=True, kw_only=True):
    """One training step, fully specified. A study's case is a subclass with additional fields."""

    size: str
    table: str = "2025"
    context: int
    batch: int
    dtype: str
    attention: str = "reference"
    compile: str = "no"
    optimizer: str = "torch"
    mode: Mode
    overrides: dict[str, int] = msgspec.field(default_factory=dict)
    compile_mode: str = "default"
    loss: str = "plain"
    fused: bool = False
    graph: bool = False
    checkpoint: str = NONE
    own: str = ""
    """`package.module:function` of a user's model, empty for a built-in model; then `size` is its
    name and `context` is 0."""
    fused_projections: bool = False
    activation_policy: str = ALL
    autotune_gemms: bool = False

    def __post_init__(self) -> None:
        check_at_least(1, batch=self.batch)
        for kind, value, known in (
            ("compile", self.compile, COMPILE),
            ("compile mode", self.compile_mode, COMPILE_MODES),
            ("loss", self.loss, LOSSES),
            ("optimizer", self.optimizer, OPTIMIZERS),
            ("mode", self.mode, MODES),
        ):
            check_known(kind, (value,), known)
        implementation(self.attention)
        precision(self.dtype)
        if self.own:
            check_name(self.own)
            if self.checkpoint not in (NONE, "1"):
                raise UsageError(
                    f"{self.own} has no segments of checkpoint={self.checkpoint}",
                    "a user's model supports --checkpoint no or 1",
                )
            check_dtype(self.own, self.dtype, self.compile)
        self.segment_sizes()
        self._check_layer_options()

    def _check_layer_options(self) -> None:
        if self.own and self.optimizer in WITHIN_BACKWARD:
            raise UsageError(f"{self.optimizer} is for the built-in models", "use stepscope-fused")
        self.kept()
        check_layer_options(self.fused, self.fused_projections, self.activation_policy)
        if precision(self.dtype).fp8 and not (self.own or self.fused_projections):
            raise UsageError(
                f"{self.dtype} runs the fused projections in FP8", "add --fused --fused-projections"
            )
        if self.autotune_gemms and not self.fused_projections:
            raise UsageError(
                "autotuned GEMMs need fused projections", "add --fused --fused-projections"
            )
        if self.fused_projections and self.compile != "no":
            raise UsageError(
                "a compiled model has no fused projections", "leave out one of the two"
            )

    @property
    def shape(self) -> ModelConfig | None:
        """The model's configuration; None for a user's model, which must be built to know it."""
        if self.own:
            return None
        return model_shape(self.size, self.table, self.context, self.overrides)

    def model(self) -> ModelConfig:
        """The configuration, or an error for a user's model."""
        shape = self.shape
        if shape is None:
            raise UsageError(f"the shape of {self.own} is unknown", "use measured counts")
        return shape

    @property
    def layers(self) -> int:
        """Number of blocks; a user's model counts as one."""
        shape = self.shape
        return 1 if shape is None else shape.n_layers

    def segment_sizes(self) -> tuple[int, ...]:
        """Blocks of each checkpointed segment, outermost first."""
        return segment_sizes(self.checkpoint, self.layers)

    def kept(self) -> tuple[str, ...]:
        """The activation policy of each block: what it saves for backward."""
        return policy_per_layer(self.activation_policy, self.layers)

    @property
    def key(self) -> str:
        """Identity among workloads, the same in every run of the same workload."""
        return self._key(self.mode, self.optimizer)

    @property
    def key_of_forward(self) -> str:
        """The key of its forward pass, which all modes and optimizers share."""
        return self._key("forward", "torch")

    def _key(self, mode: Mode, optimizer: str) -> str:
        compiled, trains = self.compile != "no", mode == "train-step"
        parts = (
            (self.table, self.table != "2025"),
            (size_key(self.size, self.overrides), True),
            (f"c{self.context}", not self.own),
            (f"b{self.batch}", True),
            (self.dtype, True),
            (self.attention, not self.own),
            (f"compile={self.compile}", compiled),
            (f"mode={self.compile_mode}", compiled and self.compile_mode != "default"),
            (f"adamw={optimizer}", trains and optimizer != "torch"),
            # A forward pass alone computes the logits.
            ("loss=fused", self.loss == "fused" and mode != "forward"),
            *(
                (name.replace("_", "-"), getattr(self, name))
                for name in ("fused", "fused_projections", "autotune_gemms", "graph")
            ),
            (f"activation-policy={self.activation_policy}", self.activation_policy != ALL),
            (f"checkpoint={self.checkpoint}", self.checkpoint != NONE),
            (mode, True),
        )
        return "_".join(part for part, present in parts if present)

    @property
    def name(self) -> str:
        """Name for findings; default values are left out, other values keep names distinct."""
        extras = unusual_settings(
            self,
            *(
                "batch",
                "attention",
                "compile",
                "compile_mode",
                "fuses_loss",
                "fused",
                "fused_projections",
            ),
            *("autotune_gemms", "activation_policy", "graph", "checkpoint"),
        )
        at = "" if self.own else f" at context {self.context}"
        words = f"{self.model_name}{at} in {self.dtype}"
        return f"{words} ({', '.join(extras)})" if extras else words

    @property
    def model_name(self) -> str:
        year = f"{self.table} " if self.table != "2025" else ""
        return f"{year}{self.size_name}"

    @property
    def size_name(self) -> str:
        return size_name(self.size, self.overrides)

    @property
    def fuses_loss(self) -> bool:
        return self.loss == "fused" and self.mode != "forward"

    @property
    def needs(self) -> tuple[str, ...]:
        """Capabilities that the device must have: dtypes, a compiler, CUDA graphs, cuBLAS."""
        policy = precision(self.dtype)
        return (
            policy.compute,
            *(["fp8"] if policy.fp8 else []),
            *([] if self.compile == "no" else ["compiler"]),
            *(["graph"] if self.graph or self.compile_mode == "reduce-overhead" else []),
            *(["cublas"] if self.autotune_gemms else []),
        )

    def recomputations(self) -> float:
        """Average number of times that a block is recomputed in the backward pass."""
        return recomputed_blocks(self.segment_sizes(), self.layers) / self.layers

    def quantities(self) -> tuple[Quantity, ...]:
        """FLOPs, tokens and parameters, known before the step runs."""
        config = self.model()
        flops = cost.flops(config, self.batch, self.context)
        counted = flops.forward if self.mode == "forward" else flops.step
        return (
            Quantity(name="flops", value=counted, unit="FLOP"),
            Quantity(name="tokens", value=self.batch * self.context, unit="tokens"),
            Quantity(name="parameters", value=cost.parameters(config).total, unit="parameters"),
        )


W = TypeVar("W", bound=Workload)


def case_of(workload: Workload, kind: type[W], flags: object = None, **fields: Any) -> W:
    """The case of a study that measures this step. Its other fields are `fields`, or the flags of
    the same name."""
    step = {name: getattr(workload, name) for name in Workload.__struct_fields__}
    more = set(kind.__struct_fields__) - step.keys() - fields.keys()
    named = {name: getattr(flags, name) for name in more if hasattr(flags, name)}
    return kind(**step, **named, **fields)


def workloads(flags: WorkloadFlags, modes: tuple[Mode, ...]) -> Iterator[Workload]:
    """Every combination, small models and short contexts first."""
    if flags.model:
        flags.refuse_sizes()
    swept = {
        "size": (check_name(flags.model),) if flags.model else flags.size,
        "context": (0,) if flags.model else flags.context,
        "batch": flags.batch,
        "dtype": tuple(precision(name).name for name in flags.dtype),
        "attention": flags.attention,
        "compile": flags.compile,
        "optimizer": flags.optimizer,
        "compile_mode": flags.compile_mode,
        "loss": flags.loss,
        "checkpoint": flags.checkpoint,
        "mode": modes,
    }
    for values in itertools.product(*swept.values()):
        yield Workload(
            **dict(zip(swept, values, strict=True)),  # type: ignore[arg-type]
            table=flags.table,
            overrides=flags.overrides,
            fused=flags.fused,
            fused_projections=flags.fused_projections,
            autotune_gemms=flags.autotune_gemms,
            activation_policy=flags.activation_policy,
            graph=flags.graph,
            own=flags.model,
        )
