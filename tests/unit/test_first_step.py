"""What keeps the first compiled step short, and steps without a CUDA graph."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import async_compile
from torch._inductor.runtime import triton_compat
from torch.fx import Interpreter

from stepscope.acceleration import torch_internals
from stepscope.acceleration.backend import Graphs
from stepscope.acceleration.copied import Copied, CopiedTogether
from stepscope.acceleration.regions import _Compiler
from stepscope.acceleration.torch_internals import prepare_compiler
from stepscope.kernels.weight_copies import WeightCopies
from stepscope.torch_tools.casts import cast_each
from stepscope.torch_tools.module_hooks import modules_of


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What `prepare_compiler` begins."""
    found: list[str] = []
    monkeypatch.setattr(async_compile, "maybe_warm_pool", lambda: found.append("workers"))
    monkeypatch.setattr(triton_compat, "triton_key", lambda: found.append("hash"))
    monkeypatch.setattr(triton_compat, "HAS_TRITON", True)
    torch_internals._hash_triton.cache_clear()
    yield found
    torch_internals._hash_triton.cache_clear()


def test_workers_and_hash_begin_before_the_first_compilation_for_a_gpu(begun: list[str]) -> None:
    before = set(threading.enumerate())
    prepare_compiler(torch.device("cpu"))
    assert begun == []
    for _ in range(2):  # Workers may have ended; the hash is known.
        prepare_compiler(torch.device("cuda"))
    for thread in set(threading.enumerate()) - before:
        thread.join()
    assert sorted(begun) == ["hash", "workers", "workers"]


class Block(nn.Module):
    def __init__(self, turned: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.turned = turned

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.up(x).relu())
        return (x + y).transpose(0, 1) if self.turned else x + y


class Model(nn.Module):
    def __init__(self, turned: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(turned) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def trained(run: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    loss = run(x)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize(("turned", "runs"), [(False, 3), (True, 5)])
def test_equal_regions_run_once_on_fake_tensors(
    turned: bool, runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first block differs: its input has no gradient. Views have the memory of others, so each
    region runs that returns one."""
    called: list[str] = []
    call = Interpreter.call_module

    def counted(self: Any, target: Any, args: Any, kwargs: Any) -> Any:
        if isinstance(self, _Compiler):
            called.append(str(target))
        return call(self, target, args, kwargs)

    monkeypatch.setattr(Interpreter, "call_module", counted)
    model = Model(turned)
    x = torch.randn(8, 8, 8, generator=torch.Generator().manual_seed(1))
    graphs = Graphs(compiler="aot_eager")
    eager = copy.deepcopy(model)
    found = trained(torch.compile(model, backend=graphs), model, x)
    torch.testing.assert_close(found, trained(eager, eager, x))
    (report,) = graphs.reports
    assert report.regions.count == 5
    assert len(called) == runs


def weights() -> list[nn.Parameter]:
    torch.manual_seed(0)
    made = [nn.Parameter(torch.randn(4, 6)) for _ in range(3)]
    made[1].requires_grad_(False)
    return made


@pytest.mark.parametrize("kept", [False, True])
def test_copies_of_a_region_are_one_node(kept: bool) -> None:
    parameters = weights()
    copies = WeightCopies(parameters, keep=kept)
    parts = tuple(
        Copied((f"w{at}",), (f"c{at}",), copies, torch.bfloat16) for at in range(len(parameters))
    )
    made = CopiedTogether(parts)(*parameters)
    assert [x.requires_grad for x in made] == [True, False, True]
    assert made[0].grad_fn is made[2].grad_fn
    for x, parameter in zip(made, parameters, strict=True):
        torch.testing.assert_close(x, parameter.bfloat16(), rtol=0, atol=0)
    # Nothing reads the last one.
    (made[0] * 3).sum().backward()
    gradient = parameters[0].grad
    assert gradient is not None
    assert gradient.dtype == torch.float32
    assert torch.equal(gradient, torch.full((4, 6), 3.0))
    assert parameters[1].grad is None
    assert parameters[2].grad is None


def test_tensors_of_the_wanted_dtype_are_not_copied() -> None:
    narrow, wide = torch.ones(2, dtype=torch.bfloat16), torch.full((2, 3), 0.5)
    made = cast_each([narrow, wide.t()], torch.bfloat16)
    assert made[0] is narrow
    assert torch.equal(made[1], wide.t().bfloat16())
    assert cast_each([narrow], torch.bfloat16) == [narrow]


def test_modules_that_are_used_twice_are_found_once() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU()))
    model.add_module("again", model[0])
    model.register_module("nothing", None)
    assert set(modules_of(model)) == set(model.modules())
    assert len(modules_of(model)) == 4
