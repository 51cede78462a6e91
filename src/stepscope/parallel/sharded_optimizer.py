"""An optimizer whose state is divided among the ranks: stage 1 of ZeRO, in two forms.

    optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)

`broadcast`: parameters have an owner, balanced by bytes, that updates them and sends them to all.
Gradients are averaged by someone else (DDP), so a step moves the gradients twice and the parameters
once. Where the optimizer treats elements one by one, a matrix is divided by rows where whole ones
do not come out even: state is within 1 % of an equal share. That is known of torch's own (Adam,
AdamW, SGD and their kin); `by_rows=True` says it of another. One that needs a parameter whole
(Adafactor, Muon, a norm for each layer) has whole ones, and no rank can then hold less than the
largest parameter.

`scatter`: gradients are averaged here, each rank receiving only its slice (reduce-scatter), and the
updated slices are gathered: gradients once, parameters once, and state divided to the element. The
optimizer must treat elements one by one (AdamW, SGD), and a missing gradient counts as zero. Do
not average gradients before: use it without DDP, or with backward passes inside `no_sync()`.

In both, parameters become views of the buffers that travel, so nothing is copied to send them.
Torch's own Adam, AdamW and SGD run in their fused form, unless `fused` or `foreach` says otherwise:
the rule is the same, the memory is passed over once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal, Protocol, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from stepscope.errors import unknown_name
from stepscope.parallel.errors import ParallelError
from stepscope.parallel.layout import require_same_lines, tensor_line
from stepscope.parallel.owned import OwnedParameters
from stepscope.parallel.slices import SlicedParameters

Form = Literal["broadcast", "scatter"]
FORMS: tuple[Form, ...] = ("broadcast", "scatter")
_HAVE_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
_BY_ELEMENT = (
    *_HAVE_FUSED, torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adamax, torch.optim.ASGD,
    torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop,
)  # fmt: skip


class Division(Protocol):
    """How the parameters of an optimizer are divided among the ranks."""

    def add_group(self, group: dict[str, Any]) -> None: ...

    def step(self, groups: list[dict[str, Any]]) -> None:
        """Update what this rank owns, with the hyperparameters of the groups; then share it."""

    def local_state(self) -> dict[str, Any]:
        """What this rank holds, by names that do not depend on the number of ranks."""

    def room(self, name: str, size: torch.Size, dtype: torch.dtype) -> Tensor | None:
        """An empty tensor for this rank's part of a saved one; None if it has none."""

    def load(self, find: Callable[[str], Any], names: set[str]) -> None:
        """Take this rank's part of a saved state."""


class ShardedOptimizer(Optimizer):
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

        params = [_readable_twice(entry) for entry in params]
        kwargs = _fused_where_possible(optimizer_cls, params, kwargs)

        def make(held: list[Tensor], options: dict[str, Any]) -> Optimizer:
            return optimizer_cls([{**options, "params": held}], **kwargs)

        self.process_group = group
        self._addresses: list[tuple[Tensor, int]] = []
        self.division: Division
        if form == "broadcast":
            rows = optimizer_cls in _BY_ELEMENT if by_rows is None else by_rows
            self.division = OwnedParameters(make, bucket_mb, group, rows)
        else:
            self.division = SlicedParameters(make, group)
        # Which hyperparameters there are, and their defaults, is the inner optimizer's to say.
        probe = optimizer_cls([torch.nn.Parameter(torch.zeros(1))], **kwargs)
        super().__init__(params, dict(probe.defaults))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        number = len(self.param_groups) - 1
        lines = [
            tensor_line(f"parameter {place} of group {number}", parameter)
            for place, parameter in enumerate(self.param_groups[-1]["params"])
        ]
        require_same_lines(lines, "optimizer", self.process_group)
        self.division.add_group(self.param_groups[-1])
        self._addresses += [(p, p.data_ptr()) for p in self.param_groups[-1]["params"]]

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update this rank's part, then bring every rank all parameters."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for parameter, address in self._addresses:
            if parameter.data_ptr() != address:
                raise ParallelError(
                    f"a parameter of {tuple(parameter.shape)} lies elsewhere than when this"
                    " optimizer was made, which updates the old place",
                    "make the optimizer after the model was moved or converted",
                )
        self.division.step(self.param_groups)
        return loss

    def state_dict(self) -> dict[str, Any]:
        """This rank's part. Save and load it with `save_optimizer` and `load_optimizer`."""
        options = [
            {key: value for key, value in group.items() if key != "params"}
            | {"shapes": [list(parameter.shape) for parameter in group["params"]]}
            for group in self.param_groups
        ]
        return {"state": self.division.local_state(), "param_groups": options}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a part that `state_dict` gave, on the same rank of as many ranks."""
        held = state_dict["state"]
        self.load_parts(lambda name: held[name], set(held), state_dict["param_groups"])

    def load_parts(
        self, find: Callable[[str], Any], names: set[str], groups: list[dict[str, Any]]
    ) -> None:
        """Take this rank's part of a state, wherever `find` gets it from."""
        own = [[list(p.shape) for p in group["params"]] for group in self.param_groups]
        saved = [[list(shape) for shape in group["shapes"]] for group in groups]
        if [len(shapes) for shapes in own] != [len(shapes) for shapes in saved]:
            raise ParallelError(
                f"the state is of another optimizer: groups of {[len(s) for s in saved]}"
                f" parameters, here {[len(s) for s in own]}"
            )
        for number, (mine, theirs) in enumerate(zip(own, saved, strict=True)):
            for place, (shape, other) in enumerate(zip(mine, theirs, strict=True)):
                if shape != other:
                    raise ParallelError(
                        f"the state is of another optimizer: parameter {place} of group {number}"
                        f" is {tuple(other)}, here {tuple(shape)}"
                    )
        self.division.load(find, names)
        for group, options in zip(self.param_groups, groups, strict=True):
            group.update({key: value for key, value in options.items() if key != "shapes"})

    def state_bytes(self) -> int:
        """What this rank's optimizer state takes."""
        held = self.division.local_state().values()
        return sum(_local(t).numel() * t.element_size() for t in held if isinstance(t, Tensor))


def _readable_twice(entry: Any) -> Any:
    if isinstance(entry, dict) and isinstance(entry["params"], Iterator):
        return {**entry, "params": list(entry["params"])}
    return entry


def _fused_where_possible(
    kind: type[Optimizer], params: Any, kwargs: dict[str, Any]
) -> dict[str, Any]:
    groups = [p["params"] if isinstance(p, dict) else p[1] if isinstance(p, tuple) else p
              for p in params]  # fmt: skip
    held = [t for g in groups for t in ([g] if isinstance(g, Tensor) else g)]
    tensors = [t[1] if isinstance(t, tuple) else t for t in held]
    able = all(t.is_floating_point() and t.device.type in ("cpu", "cuda") for t in tensors)
    free = not {"fused", "foreach", "differentiable"} & kwargs.keys()
    return {**kwargs, "fused": True} if able and free and kind in _HAVE_FUSED else kwargs


def _local(tensor: Tensor) -> Tensor:
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local
