"""The training step that several studies measure: its flags, its cases, and how to build it.

Loads without torch; `build` imports it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import msgspec

from stepscope.attention.registry import implementation
from stepscope.errors import UsageError, unknown_name
from stepscope.model import cost
from stepscope.model.checkpointing import NONE, stretches
from stepscope.model.checkpointing import run_again as blocks_again
from stepscope.model.config import ModelConfig, precision
from stepscope.model.sizes import find_size, with_overrides
from stepscope.records.schema import Quantity
from stepscope.studies.base import Case
from stepscope.studies.host_memory import refuse_beyond_host_memory
from stepscope.studies.model_names import check_name
from stepscope.studies.workload_flags import (
    COMPILE,
    COMPILE_MODES,
    GRAPHS_OF_TORCH,
    LOSSES,
    MODES,
    OPTIMIZERS,
    Mode,
    WorkloadFlags,
)

if TYPE_CHECKING:
    import torch

    from stepscope.measure.device import Device
    from stepscope.measure.timer import Phase
    from stepscope.studies.captured import CapturedStep

__all__ = [
    "COMPILE", "COMPILE_MODES", "GRAPHS_OF_TORCH", "MODES", "OPTIMIZERS", "Mode", "TrainingStep",
    "Workload", "WorkloadFlags", "step_cases", "workloads",
]  # fmt: skip


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """One training step, fully named."""

    size: str
    table: str
    context: int
    batch: int
    dtype: str
    attention: str
    compile: str
    optimizer: str
    mode: Mode
    overrides: dict[str, int] = msgspec.field(default_factory=dict)
    compile_mode: str = "default"
    loss: str = "plain"
    fused: bool = False
    graph: bool = False
    checkpoint: str = NONE
    own: str = ""
    """package.module:function that builds the model, where it is none of ours; `size` then is its
    name and `context` 0."""

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise UsageError(f"batch is {self.batch}", "it must be at least 1")
        for kind, value, known in (
            ("compile", self.compile, COMPILE),
            ("compile mode", self.compile_mode, COMPILE_MODES),
            ("loss", self.loss, LOSSES),
            ("optimizer", self.optimizer, OPTIMIZERS),
            ("mode", self.mode, MODES),
        ):
            if value not in known:
                raise unknown_name(kind, value, known)
        implementation(self.attention)
        form = precision(self.dtype)
        if self.own:
            check_name(self.own)
            if self.checkpoint not in (NONE, "1") or form.master:
                raise UsageError(
                    f"{self.own} has no checkpoint={self.checkpoint} in {self.dtype}",
                    "a model of your own has --checkpoint no or 1, and no master weights",
                )
        self.stretches()

    def model(self) -> ModelConfig:
        if self.own:
            raise UsageError(f"the shape of {self.own} is not known", "count instead")
        sized = find_size(self.size, self.table)
        return with_overrides(sized, context=self.context, **self.overrides)

    def stretches(self) -> tuple[int, ...]:
        """Blocks of each checkpointed stretch, outermost first."""
        if self.own:
            return () if self.checkpoint == NONE else (1,)
        return stretches(self.checkpoint, self.model().n_layers)

    @property
    def key(self) -> str:
        """Identity among workloads; the same in every run that measures the same thing."""
        changed = "".join(f"+{name}={value}" for name, value in sorted(self.overrides.items()))
        parts = [
            f"{self.size}{changed}", *([] if self.own else [f"c{self.context}"]), f"b{self.batch}",
            self.dtype, *([] if self.own else [self.attention]),
            *([] if self.compile == "no" else [f"compile={self.compile}"]),
        ]  # fmt: skip
        if self.table != "2025":
            parts.insert(0, self.table)
        if self.compile != "no" and self.compile_mode != "default":
            parts.append(f"mode={self.compile_mode}")
        if self.mode == "train-step" and self.optimizer != "torch":
            parts.append(f"adamw={self.optimizer}")
        # A forward alone makes the logits.
        parts += ["loss=fused"] if self.fuses_loss else []
        parts += [name for name in ("fused", "graph") if getattr(self, name)]
        if self.checkpoint != NONE:
            parts.append(f"checkpoint={self.checkpoint}")
        return "_".join((*parts, self.mode))

    @property
    def name(self) -> str:
        """In words, for findings; what goes without saying is left out, so names stay apart."""
        year = f"{self.table} " if self.table != "2025" else ""
        changed = " (changed)" if self.overrides else ""
        extras = [
            *([] if self.batch == 4 else [f"batch {self.batch}"]),
            *([] if self.attention == "reference" else [self.attention]),
            *([] if self.compile == "no" else [f"compiled by {self.compile}"]),
            *([] if self.compile_mode == "default" else [self.compile_mode]),
            *(["fused loss"] if self.fuses_loss else []),
            *(["fused pieces"] if self.fused else []),
            *(["as a graph"] if self.graph else []),
            *([] if self.checkpoint == NONE else [f"checkpointed: {self.checkpoint}"]),
        ]
        at = "" if self.own else f" at context {self.context}"
        words = f"{year}{self.size}{changed}{at} in {self.dtype}"
        return f"{words} ({', '.join(extras)})" if extras else words

    @property
    def fuses_loss(self) -> bool:
        return self.loss == "fused" and self.mode != "forward"

    def needs(self) -> tuple[str, ...]:
        """What the device must have for this: a number format, a compiler, graphs."""
        return (
            precision(self.dtype).compute,
            *([] if self.compile == "no" else ["compiler"]),
            *(["graph"] if self.graph or self.compile_mode == "reduce-overhead" else []),
        )

    def run_again(self) -> float:
        """How often each block's forward runs again in the backward, on average."""
        if self.own:
            return float(self.checkpoint != NONE)
        layers = self.model().n_layers
        return blocks_again(self.stretches(), layers) / layers

    def quantities(self) -> dict[str, Quantity]:
        """What is known of the step before it runs."""
        config = self.model()
        flops = cost.flops(config, self.batch, self.context)
        counted = flops.forward if self.mode == "forward" else flops.step
        return {
            "flops": Quantity(value=counted, unit="FLOP"),
            "tokens": Quantity(value=self.batch * self.context, unit="tokens"),
            "parameters": Quantity(value=cost.parameters(config).total, unit="parameters"),
        }


def workloads(flags: WorkloadFlags, modes: tuple[Mode, ...]) -> Iterator[Workload]:
    """Every combination, small models and short contexts first."""
    fields = {"d_model": flags.d_model, "d_ff": flags.d_ff, "n_layers": flags.layers,
              "n_heads": flags.heads, "vocab": flags.vocab}  # fmt: skip
    overrides = {name: value for name, value in fields.items() if value is not None}
    if flags.model:
        flags.refuse_sizes()
    swept = {
        "size": (check_name(flags.model),) if flags.model else flags.size,
        "context": (0,) if flags.model else flags.context, "batch": flags.batch,
        "dtype": tuple(precision(name).name for name in flags.dtype),
        "attention": flags.attention, "compile": flags.compile, "optimizer": flags.optimizer,
        "compile_mode": flags.compile_mode, "loss": flags.loss,
        "checkpoint": flags.checkpoint, "mode": modes,
    }  # fmt: skip
    for values in itertools.product(*swept.values()):
        yield Workload(
            **dict(zip(swept, values, strict=True)),  # type: ignore[arg-type]
            table=flags.table,
            overrides=overrides,
            fused=flags.fused,
            graph=flags.graph,
            own=flags.model,
        )


def step_cases(
    study: str, flags: WorkloadFlags, modes: tuple[Mode, ...], effort: dict[str, Any]
) -> tuple[Case, ...]:
    """A case for every workload; `effort` is what of its config is not the step's."""
    return tuple(
        Case(
            study=study,
            key=workload.key,
            config=msgspec.to_builtins(workload) | effort,
            needs=workload.needs(),
        )
        for workload in workloads(flags, modes)
    )


class TrainingStep:
    """A built model with its step as phases, ready for a timer.

    With `shares` it works on the weights and moments of another step of the same model. A workload
    with a model of somebody else gets an `OwnTrainingStep`.
    """

    def __new__(cls, workload: Workload, *_: Any, **__: Any) -> TrainingStep:
        if not workload.own:
            return super().__new__(cls)
        from stepscope.studies.own.training import OwnTrainingStep

        return super().__new__(OwnTrainingStep)

    def __init__(
        self, workload: Workload, device: Device, *, seed: int = 0,
        shares: TrainingStep | None = None,
    ) -> None:  # fmt: skip
        import torch

        from stepscope.model.transformer import TransformerLM
        from stepscope.studies.shared_weights import adopt_moments, adopt_weights
        from stepscope.studies.step_parts import compile_model, make_optimizer

        self._refuse_what_cannot_fit(workload, device)
        self.workload = workload
        form = precision(workload.dtype)
        torch.manual_seed(seed)
        torch.set_float32_matmul_precision("high" if form.compute == "tf32" else "highest")
        self.model: torch.nn.Module = TransformerLM(
            workload.model(),
            attention=implementation(workload.attention).function,
            device=device.torch_device if shares is None else "meta",
            dtype=getattr(torch, form.weights),
            fused=workload.fused,
            checkpoint=workload.stretches(),
        )
        if shares is not None:
            adopt_weights(self.model, shares.model)
        compile_model(self.model, workload.compile, workload.compile_mode)
        # Scaling keeps float16 gradients from vanishing; the other formats do not need it. Its step
        # reads back whether a gradient overflowed, so there the host waits, as in real training.
        self.scaler = torch.amp.GradScaler(device.kind, enabled=form.compute == "float16")
        self.optimizer = make_optimizer(
            workload.optimizer, self.model, master=form.master, capturable=workload.graph
        )
        if shares is not None:
            adopt_moments(self.optimizer, shares.optimizer)
        shape = (workload.batch, workload.context)
        vocab = workload.model().vocab
        self.tokens = torch.randint(vocab, shape, device=device.torch_device)
        self.targets = torch.randint(vocab, shape, device=device.torch_device)
        self._autocast: Callable[[], AbstractContextManager[Any]] = lambda: (
            torch.autocast(device.kind, getattr(torch, form.compute))
            if form.autocast
            else nullcontext()
        )
        self.logits: torch.Tensor | None = None
        self.loss: torch.Tensor | None = None
        self._device = device
        self._captured: CapturedStep | None = None

    @staticmethod
    def _refuse_what_cannot_fit(workload: Workload, device: Device) -> None:
        needed = cost.minimum_bytes(
            workload.model(), workload.batch, workload.context, precision(workload.dtype),
            workload.mode, workload.attention, device.kind,
            checkpointed=workload.checkpoint != NONE,
        )  # fmt: skip
        if workload.fuses_loss:
            # Counted above as if all logits were there.
            needed -= workload.batch * workload.context * workload.model().vocab * 4
        refuse_beyond_host_memory(needed, device)

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        return self.tokens, self.targets

    def quantities(self) -> dict[str, Quantity]:
        """What the step is made of, before it is measured."""
        return self.workload.quantities()

    def named_parts(self) -> AbstractContextManager[Any]:
        """For a trace: ranges around the parts of a model that has none of its own."""
        return nullcontext()

    def phases(self) -> tuple[Phase, ...]:
        """One after the other they are a step; a captured step has one."""
        from stepscope.measure.timer import Phase

        if not self.workload.graph:
            return self.eager_phases()
        if self._captured is None:
            from stepscope.studies.captured import CapturedStep

            self._captured = CapturedStep(self, self._device)
        return (Phase("replay", self._captured.replay),)

    def eager_phases(self) -> tuple[Phase, ...]:
        from stepscope.measure.timer import Phase

        forward = Phase("forward", self._forward)
        loss = () if self.workload.fuses_loss else (Phase("loss", self._loss),)
        backward = (*loss, Phase("backward", self._backward))
        return {
            "forward": (forward,),
            "forward-backward": (forward, *backward),
            "train-step": (forward, *backward, Phase("optimizer", self._optimize)),
        }[self.workload.mode]

    def reset(self) -> None:
        """Let go of what the step before left, outside of any sample."""
        if self._captured is not None:
            # What a graph reads and writes belongs to it.
            return
        self.logits = self.loss = None
        if self.workload.mode == "forward-backward":
            self.optimizer.zero_grad(set_to_none=True)

    def gradients_missing(self) -> int:
        """Parameters that a backward does not reach."""
        if self._captured is not None:
            return self._captured.gradients_missing
        self.reset()
        self._forward()
        if not self.workload.fuses_loss:
            self._loss()
        self._backward()
        missing = sum(p.grad is None for p in self.model.parameters())
        self.optimizer.zero_grad(set_to_none=True)
        self.reset()
        return missing

    def _forward(self) -> None:
        from stepscope.ranges import named

        self._mark_graph_step()
        with named("forward"), self._autocast():
            if self.workload.fuses_loss:
                self.loss = self.model(self.tokens, self.targets)
            else:
                self.logits = self.model(self.tokens)

    def _mark_graph_step(self) -> None:
        if self.workload.compile != "no" and self.workload.compile_mode in GRAPHS_OF_TORCH:
            import torch

            # What the step before left may be overwritten now.
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]

    def _loss(self) -> None:
        from stepscope.model.loss import cross_entropy

        assert self.logits is not None
        self.loss = cross_entropy(self.logits, self.targets)

    def _backward(self) -> None:
        from stepscope.ranges import named

        assert self.loss is not None
        with named("backward"):
            self.scaler.scale(self.loss).backward()  # type: ignore[no-untyped-call]

    def _optimize(self) -> None:
        from stepscope.ranges import named

        with named("optimizer"):
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad(set_to_none=True)
