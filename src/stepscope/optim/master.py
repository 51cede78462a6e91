"""Float32 master weights around any optimizer, for a model in bfloat16 or float16.

A bfloat16 weight has an 8-bit significand: an update of less than 1/256 of it is rounded away. Here
the optimizer works on a float32 copy of each weight with a float32 gradient, and the model gets the
rounded copy. Per parameter that is 4 bytes for the copy and 8 for AdamW's moments, in addition to 2
for the weight and 2 for its gradient, and 4 more for the float32 gradient while the step runs.
`FusedAdamW(master=True)` does the same for AdamW without the float32 gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from stepscope.optim.fused import MASTER
from stepscope.torch_tools.closures import ClosureOptimizer


class MasterWeights(ClosureOptimizer):
    """Float32 master weights of a 16-bit model, around any optimizer.

        optimizer = MasterWeights(model.parameters(), AdamW, lr=1e-3)

    The state of a parameter is that of the inner optimizer and its float32 copy, `master`.
    """

    def __init__(
        self, params: ParamsT, optimizer: Callable[..., Optimizer], **settings: Any
    ) -> None:
        self._make, self._settings = optimizer, settings
        self._inner: Optimizer | None = None
        # The defaults are those of the inner optimizer: schedulers read them.
        probe = optimizer([torch.zeros(1)], **settings)
        super().__init__(params, probe.defaults)

    def _step(self) -> None:
        """Update the copies, then the model."""
        inner = self._inner = self._inner or self._with_copies()
        for group, inner_group in zip(self.param_groups, inner.param_groups, strict=True):
            inner_group.update({name: value for name, value in group.items() if name != "params"})
        pairs = [
            (parameter, copy)
            for group, inner_group in zip(self.param_groups, inner.param_groups, strict=True)
            for parameter, copy in zip(group["params"], inner_group["params"], strict=True)
            if parameter.grad is not None
        ]
        for parameter, copy in pairs:
            copy.grad = parameter.grad.to(copy.dtype)
        inner.step()
        for parameter, copy in pairs:
            copy.grad = None
            self.state[parameter] = {MASTER: copy} | inner.state[copy]
        if pairs:
            torch._foreach_copy_([parameter for parameter, _ in pairs], [copy for _, copy in pairs])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        self._inner = None

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_make": self._make, "_settings": self._settings}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._inner = None

    def _with_copies(self) -> Optimizer:
        """Create the inner optimizer and the copies, from the state if there is any. This happens
        at the first step, like the creation of an optimizer's state."""
        states = {p: self.state.get(p, {}) for group in self.param_groups for p in group["params"]}
        copies = {p: state[MASTER] if MASTER in state else _wide(p) for p, state in states.items()}
        inner = self._make(
            [
                group | {"params": [copies[parameter] for parameter in group["params"]]}
                for group in self.param_groups
            ],
            **self._settings,
        )
        for parameter, state in states.items():
            rest = {name: value for name, value in state.items() if name != MASTER}
            if rest:
                inner.state[copies[parameter]] = rest
        return inner

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of a `MasterWeights` around the same class of optimizer."""
        states = state_dict["state"]
        # The base class would cast all state to the dtype of the weights, so it gets only groups.
        super().load_state_dict(state_dict | {"state": {}})
        inner = self._inner = self._with_copies()
        copies = [copy for group in inner.param_groups for copy in group["params"]]
        with torch.no_grad():
            for number, state in states.items():
                if MASTER in state:
                    copies[number].copy_(state[MASTER])
        rest = {
            number: {name: value for name, value in state.items() if name != MASTER}
            for number, state in states.items()
        }
        inner.load_state_dict(inner.state_dict() | {"state": rest})
        originals = [parameter for group in self.param_groups for parameter in group["params"]]
        for parameter, copy in zip(originals, copies, strict=True):
            if copy in inner.state:
                self.state[parameter] = {MASTER: copy} | inner.state[copy]


def _wide(parameter: Tensor) -> Tensor:
    return parameter.detach().to(torch.promote_types(parameter.dtype, torch.float32), copy=True)
