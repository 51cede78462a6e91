"""What a prediction of a change needs to know of a step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import msgspec

QUEUE = "queue"
"""Between two kernels that were both launched in time: as good as work of the device."""
BETWEEN = "between"
"""On a CPU, while no operator runs: the host is the device, and this is its work too."""
CONVOLUTION, DEPTHWISE = "convolution", "depthwise convolution"
"""Classes of matmuls on a GPU that gain otherwise, or not at all, from another dtype."""
OF_MODEL = ("forward", "loss", "backward")
CAST_BYTES = 6
"""Of a weight, read in four bytes and written in two; its gradient the other way."""
AT_END, AT_COPIES = "end", "copies"


class Runs(msgspec.Struct, frozen=True, kw_only=True):
    """Kernels of a phase that only move memory, one after the other between its products."""

    kernels: float
    """Of all launches of the phase, the share of these."""
    runs: float
    """Runs of them for each launch of the phase."""
    longest: float
    """Of their time, what the longest kernel of each run takes."""


class PhaseWork(msgspec.Struct, frozen=True, kw_only=True):
    """A phase of a step: what the device does in it, and what the host does to have it done."""

    name: str
    classes: dict[str, float]
    """Milliseconds of the device by class of kernels."""
    launches: float = 0.0
    launch_ms: float | None = None
    """Of the host, for one of these; None where only that of all launches is known."""
    host_ms: float = 0.0
    """Of the host, beside its launches: a batch that it makes."""
    runs: Runs | None = None
    """None where the order of the kernels is not known."""

    @property
    def device_ms(self) -> float:
        return sum(self.classes.values())

    def issued_ms(self, launch_ms: float) -> float:
        """What the host takes for it, with that time of a launch where it has none of its own."""
        each = launch_ms if self.launch_ms is None else self.launch_ms
        return self.host_ms + self.launches * each

    def scaled(self, by_class: Mapping[str, float], launches: float = 1.0) -> PhaseWork:
        """`by_class` has what the time of a class is multiplied with."""
        return msgspec.structs.replace(
            self,
            classes={kind: ms * by_class.get(kind, 1.0) for kind, ms in self.classes.items()},
            launches=self.launches * launches,
        )

    def less(self, ms: float) -> PhaseWork:
        """That much less to do, of whatever class."""
        left = max(0.0, 1 - ms / self.device_ms) if self.device_ms else 1.0
        return self.scaled(dict.fromkeys(self.classes, left))

    def with_more(self, kind: str, ms: float) -> PhaseWork:
        """Less, where `ms` is below zero, and never less than nothing."""
        held = max(0.0, self.classes.get(kind, 0.0) + ms)
        return msgspec.structs.replace(self, classes={**self.classes, kind: held})


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """Times in milliseconds of one step; zero or None where something is not there or not known."""

    on_gpu: bool
    step_ms: float
    """Without the profiler."""
    noise_ms: float = 0.0
    """Half of the interval of the median step: a gain below it cannot be ranked."""
    dtype: str
    """Of the matrix products."""
    autocast: bool = False
    """They have another format than the weights, which are float32."""
    phases: tuple[PhaseWork, ...]
    """In the order of the step; on a CPU operators stand in for kernels, and nothing is launched.
    """
    attention: tuple[PhaseWork, ...] = ()
    """The part of each phase that is attention written out: products, softmax, masks."""
    attention_called: bool = False
    """Torch's attention is called, and wrote it out."""
    launch_ms: float = 0.0
    """Of the host, for one launch: an operator of torch with all that belongs to it."""
    waits: str = ""
    """Where the host waits for the device in every step: at its `end`, at `copies` of its batch, or
    nowhere, and then it runs ahead."""
    reads_back: bool = False
    """A value of the device is asked for within the step."""
    score_bytes: int = 0
    """What written-out attention keeps for backward."""
    data_ms: float = 0.0
    """The host is in a DataLoader."""
    pageable_ms: float = 0.0
    """Copies from memory of the host that is not pinned."""
    cleared_ms: float = 0.0
    """Filling gradients with zeros."""
    parameters: int = 0
    flops: float = 0.0
    """Of the matrix products of a step."""
    peak_bytes: int = 0
    model_peak_bytes: int = 0
    """The peak of all but the update."""
    floor_bytes: int = 0
    """The peak of the update, which nothing that the model keeps is part of."""
    saved_bytes: int = 0
    """Kept for backward."""
    memory_bytes: int = 0
    compiled: bool = False
    captured: bool = False
    """Replayed as a CUDA graph."""
    optimizer: str = "adam"
    """Its family: `adam`, `sgd`, or empty where that is not known."""
    optimizer_name: str = ""
    """Of its class in torch.optim, where all have the same."""
    optimizer_of_torch: bool = True
    fused_optimizer: bool = False
    loops_over_tensors: bool = False
    """An optimizer of torch's that was told to go tensor by tensor."""
    blocks: int = 0
    """Repeated parts of the model, each an entry of a ModuleList."""
    block_list: str = ""
    """The path of that ModuleList below the model, such as `transformer.h`; empty if unknown."""
    loss_ms: float = 0.0
    """From logits to the loss and back."""
    logit_bytes: int = 0
    """What the loss keeps for its backward."""
    recomputed_bytes: int = 0
    """What would be kept for backward if the backward ran no forward again; 0 where it does not."""
    state_bytes: int = 0
    """Of the optimizer."""
    ranks: int = 1
    exposed_ms: float = 0.0
    """Communication that no other work hides."""
    messages: float = 0.0
    """Reductions in a step."""
    micro_batches: int = 1
    """Forwards and backwards for one update."""
    batch: int | None = None
    samples: int = 1
    """Times as many in a step as the step had that was measured."""
    rates: dict[str, float] = {}
    """FLOP/s by number format, as measured on this machine."""
    bandwidth: float | None = None
    """B/s, as measured on this machine."""
    cores: int = 0
    """Of the host; 0 if unknown."""
    threads: int = 0
    """Intra-op threads of PyTorch; 0 if unknown."""
    lacks: tuple[str, ...] = ()
    """What this machine does not have: a number format, `compiler`."""
    doubt: str = ""
    """Why the times cannot be trusted, such as a busy machine; empty where they can."""

    def is_tight(self, share: float) -> bool:
        """More than this share of the device's memory is in use at the peak."""
        return bool(self.memory_bytes) and self.peak_bytes > share * self.memory_bytes

    def lower_peak(self, fewer_bytes: int) -> int:
        """How much lower the peak is with so much less kept for backward, or higher below zero.
        The update has a peak of its own, which it does not move."""
        if not self.model_peak_bytes:
            return fewer_bytes
        return self.peak_bytes - max(self.floor_bytes, self.model_peak_bytes - fewer_bytes)

    def phase_ms(self, name: str) -> float:
        """Of the device."""
        return sum(work.device_ms for work in self.phases if work.name == name)

    def class_ms(self, *kinds: str, among: Collection[str] = OF_MODEL) -> float:
        """Of the device, in these phases."""
        return sum(
            work.classes.get(kind, 0.0)
            for work in self.phases
            if work.name in among
            for kind in kinds
        )

    @property
    def products_over_rate(self) -> float:
        """Time of the products over what it would be at the rate measured here; at least 1. That
        of attention in one kernel is left out, which has a rate of its own: if anything this is
        too low."""
        rate, took = self.rates.get(self.dtype), self.class_ms("matmul")
        least = 1e3 * self.flops / rate if rate else 0.0
        return max(1.0, took / least) if least else 1.0

    @property
    def casts_ms(self) -> float:
        """Of every weight to 16 bits, or of every gradient back, once in a step."""
        return CAST_BYTES * self.parameters / self.bandwidth * 1e3 if self.bandwidth else 0.0

    @property
    def device_ms(self) -> float:
        return sum(work.device_ms for work in self.phases)

    @property
    def host_ms(self) -> float:
        return sum(work.issued_ms(self.launch_ms) for work in self.phases)

    def with_device_times(self, factor: float) -> Facts:
        """Every time of the device multiplied by a factor."""
        scaled = self.with_work(
            lambda work: work.scaled(dict.fromkeys(work.classes, factor)),
            [work.name for work in (*self.phases, *self.attention)],
        )
        return msgspec.structs.replace(
            scaled,
            cleared_ms=factor * self.cleared_ms,
            loss_ms=factor * self.loss_ms,
            exposed_ms=factor * self.exposed_ms,
        )

    def with_work(
        self, change: Callable[[PhaseWork], PhaseWork], names: Collection[str] = OF_MODEL
    ) -> Facts:  # fmt: skip
        """The work of these phases changed, and of attention within them alike."""
        parts = {
            "phases": tuple(change(w) if w.name in names else w for w in self.phases),
            "attention": tuple(change(w) if w.name in names else w for w in self.attention),
        }
        return msgspec.structs.replace(self, **parts)
