"""The training step that several studies measure: its flags, its cases, and how to build it.

Loads without torch; `build` imports it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from stepscope.attention.registry import implementation
from stepscope.errors import UsageError, unknown_name
from stepscope.model import cost
from stepscope.model.checkpointing import NONE, stretches
from stepscope.model.checkpointing import run_again as blocks_again
from stepscope.model.config import ModelConfig, precision
from stepscope.model.sizes import find_size, with_overrides
from stepscope.records.schema import Quantity
from stepscope.studies.base import Case, CaseSkipped

if TYPE_CHECKING:
    import torch

    from stepscope.measure.device import Device
    from stepscope.measure.timer import Phase
    from stepscope.studies.captured import CapturedStep

Mode = Literal["forward", "forward-backward", "train-step"]
MODES: tuple[Mode, ...] = ("forward", "forward-backward", "train-step")
COMPILE = ("no", "block", "model")
COMPILE_MODES = (
    "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs",
)  # fmt: skip
GRAPHS_OF_TORCH = ("reduce-overhead", "max-autotune")
OPTIMIZERS = ("torch", "torch-fused", "stepscope", "stepscope-fused")
LOSSES = ("plain", "fused")

# Below this share of the memory a case may still run; above it the host would start to swap.
_HOST_MEMORY_SHARE = 0.9


class WorkloadFlags(msgspec.Struct, frozen=True, kw_only=True):
    """A sweep over training steps: every combination of the values is a case."""

    size: tuple[str, ...] = ("small",)
    """Sizes: small, medium, large, xl, 2.7b (2025); 8b, 10b (2026); tiny, mini, midi for a CPU."""
    table: Literal["2025", "2026"] = "2025"
    """Which year's size table: xl differs between them."""
    context: tuple[int, ...] = (512,)
    """Sequence lengths in tokens."""
    batch: tuple[int, ...] = (4,)
    """Sequences per step."""
    dtype: tuple[str, ...] = ("float32",)
    """Number formats: float32, tf32, bfloat16 and float16 (autocast), bfloat16-pure,
    bfloat16-master (bfloat16 with float32 master weights)."""
    attention: tuple[str, ...] = ("reference",)
    """Attention implementations: reference (naive), sdpa (torch's own), … (`list attentions`)."""
    compile: tuple[str, ...] = ("no",)
    """torch.compile: no (eager), block (each block alone), model (whole)."""
    optimizer: tuple[str, ...] = ("torch",)
    """AdamW: torch (its default), torch-fused, stepscope (the update rule written out),
    stepscope-fused (the same in one launch)."""
    compile_mode: tuple[str, ...] = ("default",)
    """Of torch.compile: default, reduce-overhead (CUDA graphs of its own), max-autotune (these and
    tuned products), max-autotune-no-cudagraphs."""
    loss: tuple[str, ...] = ("plain",)
    """plain (from all logits), fused (head and loss by chunks of rows)."""
    fused: bool = False
    """Norms, SwiGLU and rotation by our kernels; a compiled model fuses them itself."""
    graph: bool = False
    """Replay the step as a CUDA graph; only on a GPU."""
    checkpoint: tuple[str, ...] = (NONE,)
    """Blocks that run again in the backward: no, stretches of 1, 2, 4, …, levels (8-1), nested."""
    d_model: int | None = None
    """Override this field of the size."""
    d_ff: int | None = None
    """Override this field of the size."""
    layers: int | None = None
    """Override this field of the size."""
    heads: int | None = None
    """Override this field of the size."""
    vocab: int | None = None
    """Override this field of the size."""


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
        precision(self.dtype)
        self.stretches()

    def model(self) -> ModelConfig:
        sized = find_size(self.size, self.table)
        return with_overrides(sized, context=self.context, **self.overrides)

    def stretches(self) -> tuple[int, ...]:
        """Blocks of each checkpointed stretch, outermost first."""
        return stretches(self.checkpoint, self.model().n_layers)

    @property
    def key(self) -> str:
        """Identity among workloads; the same in every run that measures the same thing."""
        changed = "".join(f"+{name}={value}" for name, value in sorted(self.overrides.items()))
        parts = [
            f"{self.size}{changed}", f"c{self.context}", f"b{self.batch}", self.dtype,
            self.attention, *([] if self.compile == "no" else [f"compile={self.compile}"]),
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
        words = f"{year}{self.size}{changed} at context {self.context} in {self.dtype}"
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
    swept = {
        "size": flags.size, "context": flags.context, "batch": flags.batch,
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

    With `shares` it works on the weights and moments of another step of the same model.
    """

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

        if self.workload.compile != "no" and self.workload.compile_mode in GRAPHS_OF_TORCH:
            import torch

            # What the step before left may be overwritten now.
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        with named("forward"), self._autocast():
            if self.workload.fuses_loss:
                self.loss = self.model(self.tokens, self.targets)
            else:
                self.logits = self.model(self.tokens)

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


def refuse_beyond_host_memory(needed: int, device: Device) -> None:
    """A GPU says that it is full; a host swaps and is lost, so there a lower bound decides."""
    if device.kind == "cpu" and needed > _HOST_MEMORY_SHARE * device.memory_bytes:
        raise CaseSkipped(
            f"needs at least {needed / 2**30:.1f} GiB,"
            f" this machine has {device.memory_bytes / 2**30:.1f}"
        )
