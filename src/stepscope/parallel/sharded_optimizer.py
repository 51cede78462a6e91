"""An optimizer whose state is sharded across the ranks: ZeRO stage 1, in two forms.

`broadcast`: each parameter has an owner, balanced by bytes, that updates it and broadcasts it.
Gradients are averaged elsewhere (DDP), so a step moves the gradients twice and the parameters once.
If the optimizer is element-wise, matrices are divided by rows where complete ones cannot be
balanced: state is within 1 % of an equal share. Torch's own element-wise optimizers (Adam, AdamW,
SGD and similar) are recognized; `by_rows=True` declares another one element-wise. An optimizer that
needs a full parameter (Adafactor, Muon, a norm per layer) gets complete parameters, and then no
rank can store less than the largest parameter.

`scatter`: gradients are averaged here, each rank receives only its slice (reduce-scatter), and the
updated slices are gathered: gradients once, parameters once, and state divided evenly by elements.
The optimizer must be element-wise (AdamW, SGD). A missing gradient counts as zero, so frozen
parameters are rejected: weight decay and momentum would move them. Do not average gradients before:
use it without DDP, or with backward passes inside `no_sync()`.

A parameter that is unfrozen later is added with `add_param_group`, or, in the `broadcast` form, may
be present from the start: as in torch, a parameter without a gradient is skipped.

In both forms parameters become views of the communication buffers, so sending them needs no copy.
The options are passed through: the update is that of `optimizer_cls(params, **kwargs)`, bit for
bit, also if a matrix is divided by rows. `fused=True` selects torch's fused kernels, which read and
write memory once and round differently. The `scatter` form averages the gradients itself, so its
updates are those of the averages as that reduction rounds them.

A rank that ends, hangs or is cut off by the network makes the others raise `PeerLost` within the
timeout of the process group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from stepscope.errors import unknown_name
from stepscope.parallel.errors import ParallelError
from stepscope.parallel.model_layout import require_same_lines, tensor_line
from stepscope.parallel.owned import OwnedParameters
from stepscope.parallel.peers import connect_peers
from stepscope.parallel.slices import SlicedParameters
from stepscope.torch_tools.closures import ClosureOptimizer

Form = Literal["broadcast", "scatter"]
FORMS: tuple[Form, ...] = ("broadcast", "scatter")
_BY_ELEMENT = (
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.SGD,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adamax,
    torch.optim.ASGD,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
)


class Division(Protocol):
    """Strategy for dividing the parameters of an optimizer among the ranks."""

    def add_group(self, group: dict[str, Any]) -> None: ...

    def step(self, groups: list[dict[str, Any]]) -> None:
        """Update this rank's part with the hyperparameters of the groups, then share it."""

    def local_state(self) -> dict[str, Any]:
        """State of this rank, by names that do not depend on the number of ranks."""

    def empty_for(self, name: str, size: torch.Size, dtype: torch.dtype) -> Tensor | None:
        """Allocate a tensor for this rank's part of a saved one; None if it has no part."""

    def load(self, find: Callable[[str], Any], names: set[str]) -> None:
        """Load this rank's part of a saved state."""


class Entry(NamedTuple):
    """One parameter, and the address of its data when the buffers were created."""

    label: str
    parameter: Tensor
    address: int


class ShardedOptimizer(ClosureOptimizer):
    """Any torch optimizer with its state sharded across the ranks (ZeRO stage 1).

        optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)

    `form="broadcast"`: gradients are averaged elsewhere (DDP); each parameter has an owner that
    updates it and broadcasts it. `form="scatter"`: gradients are averaged here, and each rank
    updates its slice of all parameters; the optimizer must be element-wise, and every parameter
    trainable. `by_rows=True` declares an optimizer element-wise, so that its matrices may be
    divided by rows; torch's own are recognized. Other arguments are those of `optimizer_cls`.
    """

    def __init__(
        self,
        params: ParamsT,
        optimizer_cls: type[Optimizer],
        *,
        form: Form = "broadcast",
        bucket_mb: float = 25.0,
        by_rows: bool | None = None,
        group: dist.ProcessGroup | None = None,
        **kwargs: Any,
    ) -> None:
        if form not in FORMS:
            raise unknown_name("form", form, FORMS)
        if not dist.is_initialized():
            raise ParallelError("there is no process group", "use World.connected or torchrun")
        connect_peers(group)
        params = [_readable_twice(entry) for entry in params]

        def make(params: list[Tensor], options: dict[str, Any]) -> Optimizer:
            return optimizer_cls([{**options, "params": params}], **kwargs)

        self.process_group = group
        self._form = form
        self._entries: list[Entry] = []
        self.division: Division
        if form == "broadcast":
            rows = optimizer_cls in _BY_ELEMENT if by_rows is None else by_rows
            self.division = OwnedParameters(make, bucket_mb, group, rows)
        else:
            self.division = SlicedParameters(make, group)
        # The inner optimizer defines which hyperparameters exist and their defaults.
        probe = optimizer_cls([torch.nn.Parameter(torch.zeros(1))], **kwargs)
        super().__init__(params, dict(probe.defaults))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group, group_index = self.param_groups[-1], len(self.param_groups) - 1
        params = group["params"]
        labels = group.get("param_names") or [
            f"parameter {index} of group {group_index}" for index in range(len(params))
        ]
        named = list(zip(labels, params, strict=True))
        try:
            require_same_lines(
                [tensor_line(*entry) for entry in named], "optimizer", self.process_group
            )
            for label, parameter in named:
                self._require_trainable(label, parameter)
            self.division.add_group(group)
        except ParallelError:
            # A caller that continues without the group must not step with half of it.
            self.param_groups.pop()
            raise
        self._entries += [Entry(label, p, p.data_ptr()) for label, p in named]

    def _require_trainable(self, label: str, parameter: Tensor) -> None:
        if self._form == "scatter" and not parameter.requires_grad:
            raise ParallelError(
                f"{label} is frozen, and form='scatter' would update it as if its gradient were 0",
                "pass the parameters that require a gradient, or use form='broadcast'",
            )

    def _require_unchanged(self, entry: Entry) -> None:
        label, parameter, address = entry
        if parameter.data_ptr() != address:
            raise ParallelError(
                f"{label} {tuple(parameter.shape)} was moved or converted after this optimizer was"
                " created, which would update the old tensor",
                "create the optimizer after the model was moved or converted",
            )
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            raise ParallelError(
                f"the gradient of {label} is sparse, which ShardedOptimizer does not update",
                "create its embedding with sparse=False",
            )
        self._require_trainable(label, parameter)

    def _step(self) -> None:
        """Update this rank's part, then send the parameters to every rank."""
        for entry in self._entries:
            self._require_unchanged(entry)
        self.division.step(self.param_groups)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's part. Save and load it with `save_optimizer` and `load_optimizer`."""
        options = [
            {key: value for key, value in group.items() if key != "params"}
            | {"shapes": [list(parameter.shape) for parameter in group["params"]]}
            for group in self.param_groups
        ]
        return {"state": self.division.local_state(), "param_groups": options}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a part returned by `state_dict`, on the same rank of the same number of ranks."""
        state = state_dict["state"]
        self.load_parts(lambda name: state[name], set(state), state_dict["param_groups"])

    def load_parts(
        self, find: Callable[[str], Any], names: set[str], groups: list[dict[str, Any]]
    ) -> None:
        """Load this rank's part of a state, reading its entries with `find`."""
        own = [[list(p.shape) for p in group["params"]] for group in self.param_groups]
        saved = [[list(shape) for shape in group["shapes"]] for group in groups]
        if [len(shapes) for shapes in own] != [len(shapes) for shapes in saved]:
            raise ParallelError(
                f"the state belongs to another optimizer: groups of {[len(s) for s in saved]}"
                f" parameters, here {[len(s) for s in own]}"
            )
        for group_index, (mine, theirs) in enumerate(zip(own, saved, strict=True)):
            for index, (shape, other) in enumerate(zip(mine, theirs, strict=True)):
                if shape != other:
                    raise ParallelError(
                        f"the state belongs to another optimizer: parameter {index} of group"
                        f" {group_index}"
                        f" is {tuple(other)}, here {tuple(shape)}"
                    )
        self.division.load(find, names)
        for group, options in zip(self.param_groups, groups, strict=True):
            group.update({key: value for key, value in options.items() if key != "shapes"})

    def state_bytes(self) -> int:
        """Size of this rank's optimizer state in bytes."""
        state = self.division.local_state().values()
        return sum(_local(t).numel() * t.element_size() for t in state if isinstance(t, Tensor))


def _readable_twice(entry: Any) -> Any:
    if isinstance(entry, dict) and isinstance(entry["params"], Iterator):
        return {**entry, "params": list(entry["params"])}
    return entry


def _local(tensor: Tensor) -> Tensor:
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local
