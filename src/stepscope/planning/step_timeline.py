"""The memory of a step in which every block is a stand-in, for any costs of the blocks.

Equal blocks run once on fake tensors; a stand-in has their inputs, outputs and gradients. What a
block allocates besides is a slot, whose size is known once a plan is chosen. So the peak of a plan
is a sum over a recorded list, and takes milliseconds.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from stepscope.acceleration.forward_registry import add_layer, forward_below
from stepscope.measure.tensors import LiveStorage
from stepscope.planning.block_costs import BlockCost, BlockRun, Example
from stepscope.planning.blocks import input_signature, repeated_blocks, structures
from stepscope.planning.cuda_operators import CudaDtypes, CudaOperators, InPlaceSums
from stepscope.planning.fake_run import SIMULATED, FakeStep, run_step
from stepscope.planning.operators import OperatorLog, Rates
from stepscope.planning.ranks import ShardedModel
from stepscope.planning.simulated_bytes import WORKSPACE, SimulatedBytes
from stepscope.planning.stand_in import allocate, stand_in


class Slot(NamedTuple):
    """Memory of a block: `saved`, `copies`, `forward` or `backward` of its costs."""

    block: str
    part: str


class _Stretch(NamedTuple):
    """Allocations between two slots: their highest sum, and their sum."""

    most: int
    net: int


class StepTimeline:
    """Allocations and frees of a step, in order."""

    def __init__(self) -> None:
        self._entries: list[_Stretch | tuple[Slot, int]] = []
        self._most = self._net = 0
        self.always = WORKSPACE
        """Bytes that are not recorded."""

    def add(self, size: int) -> None:
        self._net += size
        self._most = max(self._most, self._net)

    def add_slot(self, slot: Slot, sign: int) -> None:
        self._entries += [_Stretch(self._most, self._net), (slot, sign)]
        self._most = self._net = 0

    def peak(self, costs: Mapping[str, BlockCost]) -> int:
        """Return the largest number of bytes with these costs of the blocks."""
        now = most = 0
        for entry in (*self._entries, _Stretch(self._most, self._net)):
            if isinstance(entry, _Stretch):
                most = max(most, now + entry.most)
                now += entry.net
            else:
                (block, part), sign = entry
                now += sign * getattr(costs[block], part)
                most = max(most, now)
        return most + self.always


class _Recorder(SimulatedBytes):  # type: ignore[no-untyped-call]
    """Writes a timeline; storages that are made within a slot have its size."""

    def __init__(self) -> None:
        super().__init__()
        self.timeline = StepTimeline()
        self._slot: Slot | None = None
        self._slots: dict[LiveStorage, Slot] = {}

    @contextmanager
    def within(self, slot: Slot) -> Iterator[None]:
        self._slot = slot
        yield
        self._slot = None

    def made(self, size: int, operator: str) -> LiveStorage:
        if self._slot is not None:
            storage = LiveStorage(0, operator, "")
            self._slots[storage] = self._slot
            self.timeline.add_slot(self._slot, 1)
            return storage
        before = self.blocks.in_use
        storage = super().made(size, operator)
        self.timeline.add(self.blocks.in_use - before)
        return storage

    def freed(self, storage: LiveStorage) -> None:
        slot = self._slots.pop(storage, None)
        if slot is not None:
            self.timeline.add_slot(slot, -1)
            return
        before = self.blocks.in_use
        super().freed(storage)
        self.timeline.add(self.blocks.in_use - before)


class Blocks:
    """The repeated blocks of a model in a run on fake tensors: one example of each kind is run, the
    others have stand-ins."""

    def __init__(
        self, model: nn.Module, rates: Rates, modules: Mapping[str, nn.Module] | None = None
    ) -> None:
        self.model, self.rates = model, rates
        self.modules = repeated_blocks(model) if modules is None else modules
        self._structures = structures(self.modules)
        self.examples: dict[Hashable, Example] = {}
        self.outputs: dict[Hashable, _Outputs] = {}
        self.plain: dict[Hashable, BlockRun] = {}
        """Runs of the kinds as they are, once they are known."""
        self.retained: dict[Hashable, tuple[int, ...]] = {}
        """Bytes of each differentiable input, then output, that a kind saves; 0 of others."""
        self.kinds: dict[str, Hashable] = {}
        self.calls: dict[str, int] = {}
        self._recorder: _Recorder | None = None
        self.is_compiled = False
        """Whether the blocks are compiled."""
        self.costs: Mapping[str, BlockCost] | None = None
        """Sizes of what the stand-ins allocate; None for slots."""
        self.sharded: ShardedModel | None = None
        self.until_backward: list[Tensor] = []
        self._received: list[tuple[Tensor, Hashable, int]] = []
        """Differentiable arguments, with the kinds of their blocks and their positions."""

    @contextmanager
    def standing_in(self) -> Iterator[None]:
        layers = [
            add_layer(block, self._stand_in(name, forward_below(block)), self)
            for name, block in self.modules.items()
        ]
        self.calls = dict.fromkeys(self.modules, 0)
        try:
            yield
        finally:
            for layer in layers:
                layer.remove()

    def begin(self, phase: str) -> None:
        """Begin a phase of a step with stand-ins."""
        self.until_backward.clear()
        if phase == "optimizer" and self.sharded is not None:
            self.sharded.reduce()

    def run(self, step: FakeStep, *modes: Any, update: bool = True) -> dict[str, float]:
        """Run a step with stand-ins, and return the seconds of its phases."""
        log = OperatorLog(self.rates)
        begins: list[tuple[str, float]] = []

        def begin(phase: str) -> None:
            self.begin(phase)
            begins.append((phase, log.seconds))

        with self.standing_in(), CudaDtypes(), CudaOperators(), ExitStack() as stack:
            for mode in (*modes, log, InPlaceSums()):
                stack.enter_context(mode)
            run_step(step, begin, update=update)
        seconds: dict[str, float] = defaultdict(float)
        for (phase, begin_s), (_, end_s) in itertools.pairwise([*begins, ("", log.seconds)]):
            seconds[phase] += end_s - begin_s
        return seconds

    def record(self, step: FakeStep) -> Recorded:
        """Run a step with stand-ins for all blocks of known kinds, and return its timeline."""
        self._recorder = recorder = _Recorder()
        tensors = [*self.model.parameters(), *self.model.buffers(), *tree_leaves(step.batch)]
        if self.sharded is not None:
            tensors += tree_leaves(self.sharded.lines)
        tensors += tree_leaves([*step.optimizer.state.values()])
        recorder.count(x for x in tensors if isinstance(x, Tensor))
        seconds = self.run(step, recorder)
        parts = step.options.micro_batches
        repeats = parts / min(parts, SIMULATED)
        return Recorded(
            recorder.timeline,
            {name: repeats * count for name, count in self.calls.items()},
            repeats * seconds["forward"],
            repeats * seconds["backward"],
            seconds["optimizer"],
        )

    def _stand_in(self, name: str, below: Callable[..., Any]) -> Callable[..., Any]:
        def run(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return below(*args, **kwargs)
            kind = (self._structures[name], input_signature(args, kwargs))
            self.kinds[name] = kind
            self.calls[name] += 1
            if self._recorder is None and self.costs is None:
                self._received += [
                    (one, kind, at)
                    for at, one in enumerate(args)
                    if isinstance(one, Tensor) and one.requires_grad
                ]
            leaves, _ = tree_flatten((args, kwargs))
            if kind not in self.outputs:
                self.examples[kind] = Example(block, args, kwargs)
                self.outputs[kind] = _Outputs.of(below(*args, **kwargs), leaves)
            inputs = [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]
            parameters = [p for p in block.parameters() if p.requires_grad]
            made = stand_in(_Block(self, name, len(inputs)), [*inputs, *parameters])
            return self.outputs[kind].filled(made, leaves)

        return run

    def own_inputs(self, kind: Hashable) -> tuple[int, ...]:
        """Return the positions of differentiable arguments that no other block receives."""
        storages = Counter(one.untyped_storage()._cdata for one, *_ in self._received)
        those = [(one.untyped_storage()._cdata, at) for one, of, at in self._received if of == kind]
        shared = {at for storage, at in those if storages[storage] > 1}
        return tuple(sorted({at for _, at in those} - shared))

    def allocated(self, name: str, part: str) -> Tensor:
        """The memory of a slot."""
        if self.costs is not None:
            return allocate(getattr(self.costs[name], part), part)
        with nullcontext() if self._recorder is None else self._recorder.within(Slot(name, part)):
            return torch.empty(1)


class Recorded(NamedTuple):
    """A step with stand-ins: its timeline, and the seconds of what is not in a block."""

    timeline: StepTimeline
    calls: dict[str, float]
    forward_s: float
    backward_s: float
    optimizer_s: float


class _Block(NamedTuple):
    """A block of a model, as its stand-in sees it."""

    blocks: Blocks
    name: str
    inputs: int
    """Number of its differentiable inputs."""

    @property
    def is_compiled(self) -> bool:
        return self.blocks.is_compiled

    @property
    def outputs(self) -> list[Tensor]:
        return self.blocks.outputs[self.blocks.kinds[self.name]].tensors

    def allocated(self, what: str) -> Tensor:
        return self.blocks.allocated(self.name, what)

    def retained(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> list[Tensor]:
        trained = itertools.compress(outputs, (one.requires_grad for one in self.outputs))
        sizes = self.blocks.retained.get(self.blocks.kinds[self.name], ())
        return [*itertools.compress((*inputs[: self.inputs], *trained), sizes)]

    def keep_in_forward(self, copies: Tensor) -> None:
        self.blocks.until_backward.append(copies)


class _Input(NamedTuple):
    """An output of a block that is one of its inputs."""

    position: int


class _Outputs(NamedTuple):
    """The outputs of a block: tensors to create, inputs that are passed on, and constants."""

    leaves: tuple[Any, ...]
    tree: Any

    @classmethod
    def of(cls, output: Any, inputs: list[Any]) -> _Outputs:
        leaves, tree = tree_flatten(output)
        index = {id(leaf): at for at, leaf in enumerate(inputs) if isinstance(leaf, Tensor)}
        return cls(tuple(_Input(index[id(x)]) if id(x) in index else x for x in leaves), tree)

    @property
    def tensors(self) -> list[Tensor]:
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    def filled(self, made: Any, inputs: list[Any]) -> Any:
        """Return the output with these tensors."""
        new = iter(made)
        leaves = [next(new) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        leaves = [inputs[leaf.position] if isinstance(leaf, _Input) else leaf for leaf in leaves]
        return tree_unflatten(leaves, self.tree)
