"""Facts about a training step that the predictions of changes rest on."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import msgspec

from stepscope.records.plans import Planned, PlannedStep
from stepscope.records.sharing import Sharing

QUEUE = "queue"
"""Gap between two kernels that were both launched in time: counted as device work."""
BETWEEN = "between"
"""CPU time between operators: the host is the device, so this counts as its work."""
CONVOLUTION, DEPTHWISE = "convolution", "depthwise convolution"
"""Classes of GPU matmuls that gain differently, or not at all, from another dtype."""
MODEL_PHASES = ("forward", "loss", "backward")
CAST_BYTES = 6
"""Bytes moved by casting one weight: four read, two written; the reverse for its gradient."""
AT_END, AT_COPIES = "end", "copies"


class Runs(msgspec.Struct, frozen=True, kw_only=True):
    """Runs of consecutive memory-bound kernels between the matmuls of a phase."""

    kernels: float
    """Share of the phase's launches that are memory-bound kernels."""
    runs: float
    """Number of runs per launch of the phase."""
    longest: float
    """Share of the kernels' time spent in the longest kernel of each run."""


class PhaseWork(msgspec.Struct, frozen=True, kw_only=True):
    """Work of one phase: device time by kernel class, and host time to issue it."""

    name: str
    classes: dict[str, float]
    """Device milliseconds by kernel class."""
    launches: float = 0.0
    launch_ms: float | None = None
    """Host time per launch; None if only the average over all launches is known."""
    host_ms: float = 0.0
    """Host time besides the launches, such as preparing a batch."""
    runs: Runs | None = None
    """None if the order of the kernels is unknown."""

    @property
    def device_ms(self) -> float:
        return sum(self.classes.values())

    def issued_ms(self, launch_ms: float) -> float:
        """Host time of the phase; `launch_ms` is used if the phase has no launch time itself."""
        each = launch_ms if self.launch_ms is None else self.launch_ms
        return self.host_ms + self.launches * each

    def scaled(self, by_class: Mapping[str, float], launches: float = 1.0) -> PhaseWork:
        """Multiply the time of each class by its factor in `by_class`, and the launches."""
        return msgspec.structs.replace(
            self,
            classes={kind: ms * by_class.get(kind, 1.0) for kind, ms in self.classes.items()},
            launches=self.launches * launches,
        )

    def less(self, ms: float) -> PhaseWork:
        """Remove `ms` of device time, in proportion from all classes."""
        left = max(0.0, 1 - ms / self.device_ms) if self.device_ms else 1.0
        return self.scaled(dict.fromkeys(self.classes, left))

    def with_more(self, kind: str, ms: float) -> PhaseWork:
        """Add `ms` to one class; negative values subtract, down to zero."""
        total = max(0.0, self.classes.get(kind, 0.0) + ms)
        return msgspec.structs.replace(self, classes={**self.classes, kind: total})


class Siblings(msgspec.Struct, frozen=True, kw_only=True):
    """Modules that a loop calls one after the other, each with its own weights."""

    where: str
    """File and line of the loop."""
    modules: int
    operators: dict[str, float]
    """Operators of a step in the forward and in the backward."""
    heads: bool = False
    """They are heads of an attention."""


_LOADER_BOUND = 0.1
"""Share of the step in a DataLoader with workers from which on the loop waits for them."""


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about one step, times in milliseconds. Zero or None: absent or unknown."""

    on_gpu: bool
    step_ms: float
    """Measured without the profiler."""
    noise_ms: float = 0.0
    """Half the confidence interval of the median step: a gain below it cannot be ranked."""
    dtype: str
    """Dtype of the matmuls."""
    autocast: bool = False
    """The matmuls have another dtype than the weights, which are float32."""
    phases: tuple[PhaseWork, ...]
    """In the order of the step. On a CPU, operators stand for kernels and nothing is launched."""
    kernels: float = 0.0
    """Kernels of the step, on a CPU operators; 0 if they were not counted."""
    attention: tuple[PhaseWork, ...] = ()
    """Naive attention in each phase: matmuls, softmax, masks."""
    attention_called: bool = False
    """PyTorch's attention is called, but falls back to its naive (math) implementation."""
    launch_ms: float = 0.0
    """Host time per launch: a PyTorch operator with everything it does."""
    waits: str = ""
    """Point of each step where the host waits for the device: its `end`, or `copies` of the batch.
    Empty if it never waits and runs ahead."""
    reads_back: bool = False
    """The program reads a value from the device within the step."""
    score_bytes: int = 0
    """Bytes that naive attention saves for backward."""
    data_ms: float = 0.0
    """Time the host spends in a DataLoader."""
    loader_workers: int = 0
    """Worker processes of that DataLoader."""
    pageable_ms: float = 0.0
    """Time of copies from pageable (not pinned) host memory."""
    cleared_ms: float = 0.0
    """Time spent filling gradients with zeros."""
    parameters: int = 0
    flops: float = 0.0
    """FLOPs of the matmuls of a step."""
    peak_bytes: int = 0
    model_peak_bytes: int = 0
    """Peak of everything except the optimizer update."""
    floor_bytes: int = 0
    """Peak of the optimizer update, which does not include tensors saved for backward."""
    saved_bytes: int = 0
    """Bytes saved for backward."""
    memory_bytes: int = 0
    compiled: bool = False
    compiled_by_accelerate: bool = False
    """`stepscope.accelerate` compiles the model by default; False if that is not recorded."""
    captured: bool = False
    """The step is replayed as a CUDA graph."""
    optimizer: str = "adam"
    """Optimizer family: `adam`, `sgd`, or empty if unknown."""
    optimizer_name: str = ""
    """Class name in torch.optim, if all optimizers have the same class."""
    optimizer_of_torch: bool = True
    fused_optimizer: bool = False
    one_launch_optimizer: bool = False
    """The update of all tensors is one kernel of `stepscope.accelerate`."""
    loops_over_tensors: bool = False
    """An optimizer of torch.optim that was configured to update tensor by tensor."""
    blocks: int = 0
    """Number of repeated blocks: entries of a ModuleList."""
    block_list: str = ""
    """The path of that ModuleList below the model, such as `transformer.h`; empty if unknown."""
    linear_ms: float = 0.0
    """Device time of the matmuls of linear layers in repeated blocks, in the forward pass."""
    linear_matmuls: float = 0.0
    """Number of these matmuls, in all micro-batches."""
    uses_fp8: bool = False
    """Matmuls run in FP8."""
    siblings: tuple[Siblings, ...] = ()
    loss_ms: float = 0.0
    """Time from the logits to the loss, forward and backward."""
    logit_bytes: int = 0
    """Bytes that the loss saves for backward."""
    plans: Planned = ()
    """Plans of the memory of the step, and of larger ones."""
    recomputed_bytes: int = 0
    """Bytes that would be saved for backward without activation checkpointing; 0 if none is used.
    """
    state_bytes: int = 0
    """Bytes of the optimizer state."""
    ranks: int = 1
    sharing: Sharing | None = None
    """How the ranks share the model; None if that is not recorded."""
    exposed_ms: float = 0.0
    """Communication time that is not overlapped with other work."""
    gathers_ms: dict[str, float] = {}
    """Time of gathering parameters in each phase, overlapped or not."""
    collectives_ms: dict[str, float] = {}
    """The same of all communication."""
    messages: float = 0.0
    """Reductions per step."""
    micro_batches: int = 1
    """Forward and backward passes per update."""
    batch: int | None = None
    samples: float = 1
    """Samples per step as a multiple of the measured step's."""
    rates: dict[str, float] = {}
    """FLOP/s by dtype, measured on this machine."""
    bandwidth: float | None = None
    """B/s, measured on this machine."""
    ceiling_doubts: dict[str, str] = {}
    """Reasons why ceilings may be too low, by name, such as `matmul.float32`."""
    rates_basis: str = "here"
    """Source of the rates: measured here, or a data sheet."""
    cores: int = 0
    """CPU cores of the host; 0 if unknown."""
    threads: int = 0
    """Intra-op threads of PyTorch; 0 if unknown."""
    lacks: tuple[str, ...] = ()
    """Features this machine does not have: a dtype, or `compiler`."""
    doubt: str = ""
    """Reason why the times cannot be trusted, such as a busy machine; empty if they can."""
    ordered: bool = True
    """Even times that cannot be trusted show an order of the changes: the machine was busy, but the
    work was that of a step."""

    @property
    def loader_bound(self) -> bool:
        """True if steps take as long as the workers of the DataLoader take for a batch. Taking a
        batch that is ready also takes a little time."""
        return self.loader_workers > 0 and self.data_ms >= _LOADER_BOUND * self.step_ms

    def planned(self, what: str) -> PlannedStep | None:
        """Return the plans of the `step`, or of twice its `batch` or its `context`."""
        return next((one for one in self.plans if one.what == what), None)

    def is_tight(self, share: float) -> bool:
        """Return True if the peak uses more than this share of the device's memory."""
        return bool(self.memory_bytes) and self.peak_bytes > share * self.memory_bytes

    def lower_peak(self, fewer_bytes: int) -> int:
        """Return by how much the peak drops if fewer bytes are saved for backward.

        The optimizer update has its own peak, which does not change. Negative: the peak rises.
        """
        if not self.model_peak_bytes:
            return fewer_bytes
        return self.peak_bytes - max(self.floor_bytes, self.model_peak_bytes - fewer_bytes)

    def phase_ms(self, name: str) -> float:
        """Device time of a phase."""
        return sum(work.device_ms for work in self.phases if work.name == name)

    def class_ms(self, *kinds: str, among: Collection[str] = MODEL_PHASES) -> float:
        """Device time of these kernel classes in these phases."""
        return sum(
            work.classes.get(kind, 0.0)
            for work in self.phases
            if work.name in among
            for kind in kinds
        )

    @property
    def matmuls_over_rate(self) -> float:
        """Matmul time over that at the rate measured here; at least 1.

        Fused attention is left out because it has its own rate, so this is a lower bound.
        """
        rate, took = self.rates.get(self.dtype), self.class_ms("matmul")
        least = 1e3 * self.flops / rate if rate else 0.0
        return max(1.0, took / least) if least else 1.0

    @property
    def casts_ms(self) -> float:
        """Time to cast every weight to 16 bits, or every gradient back, once per step."""
        return CAST_BYTES * self.parameters / self.bandwidth * 1e3 if self.bandwidth else 0.0

    @property
    def device_ms(self) -> float:
        return sum(work.device_ms for work in self.phases)

    @property
    def host_ms(self) -> float:
        return sum(work.issued_ms(self.launch_ms) for work in self.phases)

    def with_device_times(self, factor: float) -> Facts:
        """Multiply every device time by a factor."""
        scaled = self.with_work(
            lambda work: work.scaled(dict.fromkeys(work.classes, factor)),
            [work.name for work in (*self.phases, *self.attention)],
        )
        return msgspec.structs.replace(
            scaled,
            cleared_ms=factor * self.cleared_ms,
            loss_ms=factor * self.loss_ms,
            linear_ms=factor * self.linear_ms,
            exposed_ms=factor * self.exposed_ms,
            gathers_ms={phase: factor * ms for phase, ms in self.gathers_ms.items()},
            collectives_ms={phase: factor * ms for phase, ms in self.collectives_ms.items()},
        )

    def with_less_communication(self, ms: Mapping[str, float]) -> Facts:
        """Remove exposed communication from each phase."""
        less = self.with_work(
            lambda work: work.with_more("communication", -ms.get(work.name, 0.0)), ms
        )
        return msgspec.structs.replace(
            less, exposed_ms=max(0.0, self.exposed_ms - sum(ms.values()))
        )

    def with_work(
        self, change: Callable[[PhaseWork], PhaseWork], names: Collection[str] = MODEL_PHASES
    ) -> Facts:
        """Apply `change` to the work of these phases and to the attention within them."""
        parts = {
            "phases": tuple(change(w) if w.name in names else w for w in self.phases),
            "attention": tuple(change(w) if w.name in names else w for w in self.attention),
        }
        return msgspec.structs.replace(self, **parts)
