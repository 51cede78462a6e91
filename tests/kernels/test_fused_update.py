"""The fused update of a live torch.optim.AdamW or Adam, in place."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_fused_adamw import DEVICE, groups, launches, parameters, train
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from accuracy import hold_to_policy
from pairwise import pairwise
from stepscope.acceleration.optimizer import FusedUpdate, fuse_optimizer
from stepscope.kernels.weight_copies import WeightCopies
from stepscope.optim import FusedAdamW

__all__ = ["launches"]
KEYS = {"step", "exp_avg", "exp_avg_sq"}
FLAGS: dict[str, dict[str, Any]] = {
    "default": {},
    "foreach": {"foreach": True},
    "single tensor": {"foreach": False},
    "fused": {"fused": True},
}


def fused(optimizer: Optimizer, copies: WeightCopies | None = None) -> FusedUpdate:
    update = fuse_optimizer(optimizer, copies)
    assert isinstance(update, FusedUpdate), update
    return update


def state_of(optimizer: Optimizer, params: list[nn.Parameter]) -> dict[str, Tensor]:
    return {
        f"{name} of {number}": tensor.clone()
        for number, parameter in enumerate(params)
        for name, tensor in {
            "parameter": parameter.detach(),
            **optimizer.state[parameter],
        }.items()
    }


def pair(**how: Any) -> tuple[list[nn.Parameter], Optimizer, list[nn.Parameter], Optimizer]:
    """Two equal optimizers of equal parameters."""
    ours, theirs = parameters(), parameters()
    return ours, AdamW(groups(ours), **how), theirs, AdamW(groups(theirs), **how)


@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
def test_steps_match_torch_and_equal_fused_adamw(
    flags: dict[str, Any], launches: list[int]
) -> None:
    def trained(make: Callable[..., Optimizer], dtype: torch.dtype, fuse: bool) -> Any:
        params = parameters(dtype)
        optimizer = make(groups(params))
        if fuse:
            fused(optimizer)
        train(params, optimizer, 20, skip=3)
        return state_of(optimizer, params)

    def of_torch(params: Any) -> Optimizer:
        return AdamW(params, **flags)

    def of_library(params: Any) -> Optimizer:
        return FusedAdamW(params, capturable="fused" in flags)

    ours = trained(of_torch, torch.float32, True)
    assert launches == [5, 4, *[5] * 18], "one launch a step takes all tensors"
    library = trained(of_library, torch.float32, False)
    assert ours.keys() == library.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, library[name]), name
    exact = trained(of_torch, torch.float64, False)
    hold_to_policy(exact, trained(of_torch, torch.float32, False), ours)


@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
@pytest.mark.parametrize("prepared", [False, True], ids=["eager", "prepared"])
def test_the_state_is_that_of_torch_in_both_directions(
    flags: dict[str, Any], prepared: bool
) -> None:
    ours, optimizer, theirs, reference = pair(**flags)
    train(ours, optimizer, 2)
    train(theirs, reference, 2)
    update = fused(optimizer)
    if prepared:
        optimizer.prepare()  # type: ignore[attr-defined]
    train(ours, optimizer, 2, start=2)
    train(theirs, reference, 2, start=2)
    saved, expected = optimizer.state_dict(), reference.state_dict()
    assert saved["param_groups"] == expected["param_groups"]
    for number, state in expected["state"].items():
        assert saved["state"][number].keys() == KEYS
        for name, value in state.items():
            actual = saved["state"][number][name]
            assert (actual.dtype, actual.device, actual.shape) == (
                value.dtype,
                value.device,
                value.shape,
            )
            assert actual.untyped_storage().nbytes() == value.untyped_storage().nbytes()
    # Into an optimizer of torch, and back.
    plain = AdamW(groups(moved := copy.deepcopy(ours)), **flags)
    plain.load_state_dict(copy.deepcopy(saved))
    train(moved, plain, 1, start=4)
    train(ours, optimizer, 1, start=4)
    torch.testing.assert_close(moved, ours, rtol=1e-6, atol=1e-7)
    optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))
    train(moved, plain, 1, start=5)
    train(ours, optimizer, 1, start=5)
    update.undo()
    train(moved, plain, 1, start=6)
    train(ours, optimizer, 1, start=6)
    torch.testing.assert_close(moved, ours, rtol=1e-6, atol=1e-7)
    assert {float(state["step"]) for state in optimizer.state.values()} == {7.0}


@pytest.mark.parametrize("prepared", [False, True], ids=["eager", "prepared"])
def test_undo_restores_the_optimizer(prepared: bool, launches: list[int]) -> None:
    ours, optimizer, theirs, reference = pair()
    scheduler = LambdaLR(optimizer, lambda epoch: 0.9**epoch)
    before = dict(vars(optimizer))
    identities = (optimizer.param_groups, *optimizer.param_groups)
    update = fused(optimizer)
    train(ours, optimizer, 1)
    if prepared:
        optimizer.prepare()  # type: ignore[attr-defined]
    train(ours, optimizer, 1, start=1)
    assert isinstance(optimizer, AdamW)
    assert optimizer.param_groups is identities[0]
    assert all(
        one is other for one, other in zip(optimizer.param_groups, identities[1:], strict=True)
    )
    scheduler.step()
    update.undo()
    # The scheduler sets this one in its wrapper of step().
    assert vars(optimizer).pop("_opt_called")
    assert vars(optimizer) == before
    assert not optimizer._optimizer_step_post_hooks
    assert not optimizer._optimizer_state_dict_post_hooks
    counts = [state["step"] for state in optimizer.state.values()]
    assert {(one.device.type, one.dtype, one.item()) for one in counts} == {
        ("cpu", torch.float32, 2.0)
    }
    assert launches == [5, 5]
    train(ours, optimizer, 1, start=2)
    assert launches == [5, 5]
    assert isinstance(fuse_optimizer(optimizer), FusedUpdate), "it can be fused again"
    LambdaLR(reference, lambda epoch: 0.9**epoch)
    train(theirs, reference, 2)
    for group in reference.param_groups:
        group["lr"] *= 0.9
    train(theirs, reference, 1, start=2)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("when", ["before", "after"])
def test_schedulers(when: str, launches: list[int]) -> None:
    ours, optimizer, theirs, reference = pair()
    schedulers = [LambdaLR(reference, lambda epoch: 0.5**epoch)]
    if when == "before":
        schedulers.append(LambdaLR(optimizer, lambda epoch: 0.5**epoch))
    update = fused(optimizer)
    if when == "after":
        schedulers.append(LambdaLR(optimizer, lambda epoch: 0.5**epoch))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(4):
            train(ours, optimizer, 1, start=step)
            train(theirs, reference, 1, start=step)
            for scheduler in schedulers:
                scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [
        group["lr"] for group in reference.param_groups
    ]
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert len(launches) == 4
    update.undo()
    train(ours, optimizer, 1)
    assert len(launches) == 4


def test_hooks_closures_and_profiler_names() -> None:
    ours, optimizer, *_ = pair()
    fused(optimizer)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    optimizer.register_state_dict_pre_hook(lambda _: calls.append("state"))

    def closure() -> float:
        calls.append("closure")
        assert torch.is_grad_enabled()
        for parameter in ours:
            parameter.grad = torch.ones_like(parameter)
        return 7.5

    before = ours[0].detach().clone()
    assert optimizer.step(closure) == 7.5
    optimizer.state_dict()
    assert calls == ["pre", "closure", "post", "state"]
    assert not torch.equal(ours[0], before)


def test_groups_and_parameters_added_later(launches: list[int]) -> None:
    ours, optimizer, theirs, reference = pair()
    fused(optimizer)
    late = [nn.Parameter(torch.ones(7, device=DEVICE)) for _ in range(2)]
    for step in range(3):
        if step == 1:
            for parameter, one in zip(late, (optimizer, reference), strict=True):
                one.add_param_group({"params": [parameter], "lr": 0.3})
        train([*ours, late[0]], optimizer, 1, start=step)
        train([*theirs, late[1]], reference, 1, start=step)
    assert launches == [5, 6, 6]
    torch.testing.assert_close([*ours, late[0]], [*theirs, late[1]], rtol=1e-5, atol=1e-6)


def mixed() -> list[nn.Parameter]:
    """Two parameters that the kernel updates, a float64, a transposed and an empty one."""
    wide = nn.Parameter(torch.ones(4, dtype=torch.float64, device=DEVICE))
    transposed = nn.Parameter(torch.ones(6, 4, device=DEVICE).T)
    return [*parameters()[:2], wide, transposed, nn.Parameter(torch.ones(0, device=DEVICE))]


@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
def test_torch_updates_what_the_kernel_does_not_support(
    flags: dict[str, Any], launches: list[int]
) -> None:
    # torch's own fused update refuses a gradient with other strides than its parameter on a GPU.
    strided = not (flags.get("fused") and DEVICE == "cuda")
    ours, theirs = mixed(), mixed()
    optimizer, reference = AdamW(ours, **flags), AdamW(theirs, **flags)
    fused(optimizer)
    for step in range(3):
        for params in (ours, theirs):
            for parameter in params:
                parameter.grad = torch.full_like(parameter, 0.5 + step)
            if step == 1 and strided:
                params[1].grad = torch.zeros(len(params[1]), 2, device=DEVICE)[:, 0]
        optimizer.step()
        reference.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
    assert launches == [2, 1 if strided else 2, 2]


def test_sparse_gradients_raise_as_in_torch() -> None:
    table = nn.Embedding(5, 3, sparse=True, device=DEVICE)
    optimizer = AdamW(table.parameters())
    fused(optimizer)
    table(torch.tensor([1], device=DEVICE)).sum().backward()
    with pytest.raises(RuntimeError, match="does not support sparse gradients"):
        optimizer.step()


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), "SGD is not torch.optim.AdamW or Adam"),
        (lambda p: AdamW(p, amsgrad=True), "amsgrad=True"),
        (lambda p: AdamW(p, maximize=True), "maximize=True"),
        (lambda p: AdamW(p, differentiable=True), "differentiable=True"),
        (lambda p: Adam(p, weight_decay=0.1), "L2 penalty"),
        (lambda p: AdamW([p[0].detach().double()]), "no parameter is a dense"),
        (lambda p: FusedAdamW(p), "FusedAdamW is not"),
    ],
)
def test_reasons(make: Callable[[list[nn.Parameter]], Optimizer], reason: str) -> None:
    optimizer = make(parameters())
    before = dict(vars(optimizer))
    answer = fuse_optimizer(optimizer)
    assert isinstance(answer, str)
    assert reason in answer
    assert vars(optimizer) == before


def test_a_subclass_with_its_own_rule_and_a_second_call_are_refused() -> None:
    class Own(AdamW):
        def step(self, closure: Any = None) -> Any:
            return closure

    assert "its own step()" in str(fuse_optimizer(Own(parameters())))
    optimizer = AdamW(parameters())
    fused(optimizer)
    assert fuse_optimizer(optimizer) == "its update is already replaced"


def test_adam_without_weight_decay_and_groups_that_torch_updates(launches: list[int]) -> None:
    def grouped(params: list[nn.Parameter]) -> list[dict[str, Any]]:
        return [{"params": params[:3]}, {"params": params[3:], "weight_decay": 0.5}]

    ours, theirs = parameters(), parameters()
    optimizer, reference = Adam(grouped(ours), lr=0.01), Adam(grouped(theirs), lr=0.01)
    update = fused(optimizer)
    assert len(update.left) == 1
    assert "L2 penalty" in update.left[0]
    train(ours, optimizer, 3)
    train(theirs, reference, 3)
    assert launches == [3, 3, 3]
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    # An option that is set later is respected.
    optimizer.param_groups[0]["maximize"] = reference.param_groups[0]["maximize"] = True
    train(ours, optimizer, 1, start=3)
    train(theirs, reference, 1, start=3)
    assert launches == [3, 3, 3]
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_tensor_learning_rate_may_change_in_place() -> None:
    weight = nn.Parameter(torch.ones(3, device=DEVICE))
    rate = torch.tensor(0.1)
    optimizer = AdamW([weight], lr=rate, weight_decay=0.0)
    fused(optimizer)
    moved = []
    for _ in range(3):
        before = weight.detach().clone()
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        moved.append(float((before - weight.detach())[0]))
        rate.mul_(0.1)
    assert moved == pytest.approx([0.1, 0.01, 0.001], rel=1e-3)


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@pytest.mark.parametrize("prepared", [False, True], ids=["eager", "prepared"])
def test_a_copy_is_an_optimizer_of_torch(how: str, prepared: bool, launches: list[int]) -> None:
    params = parameters()
    optimizer = AdamW(groups(params))
    fused(optimizer)
    train(params, optimizer, 2)
    if prepared:
        optimizer.prepare()  # type: ignore[attr-defined]
    both = (params, optimizer)
    params_copy, optimizer_copy = (
        copy.deepcopy(both) if how == "deepcopy" else pickle.loads(pickle.dumps(both))
    )
    train(params, optimizer, 2, start=2)
    assert len(launches) == 4
    train(params_copy, optimizer_copy, 2, start=2)
    assert len(launches) == 4
    assert type(optimizer_copy) is AdamW
    torch.testing.assert_close(params_copy, params, rtol=1e-6, atol=1e-7)


class TestGradScaler:
    """Loss scaling with and without the optimizer's own unscaling, and a skipped step."""

    @staticmethod
    def run(fuse: bool, prepared: bool, unscale: bool, flags: dict[str, Any]) -> Any:
        params = parameters()
        optimizer = AdamW(groups(params), **flags)
        if fuse:
            fused(optimizer)
        scaler = torch.amp.GradScaler(DEVICE, init_scale=1024.0, growth_interval=2)
        steps = []
        for step in range(5):
            for number, parameter in enumerate(params):
                gradient = torch.linspace(-1, 1, parameter.numel(), device=DEVICE)
                parameter.grad = scaler.scale(gradient.view_as(parameter)) * (number + step + 1)
            if step == 2:
                params[1].grad[0] = float("inf")
            if fuse and prepared:
                optimizer.prepare()  # type: ignore[attr-defined]
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            steps.append(sorted(float(state["step"]) for state in optimizer.state.values()))
            assert not hasattr(optimizer, "found_inf")
        gradients = [parameter.grad for parameter in params]
        return params, gradients, steps, scaler.get_scale()

    @pairwise({"flags": FLAGS.values(), "prepared": [False, True], "unscale": [False, True]})
    def test_matches_torch(self, flags: dict[str, Any], prepared: bool, unscale: bool) -> None:
        ours = self.run(True, prepared, unscale, flags)
        theirs = self.run(False, False, unscale, flags)
        assert ours[2] == theirs[2]
        assert ours[3] == theirs[3]
        torch.testing.assert_close(ours[0], theirs[0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(ours[1], theirs[1], rtol=1e-6, atol=1e-6)

    def test_torch_updates_the_rest_of_a_prepared_optimizer(self) -> None:
        results = []
        for fuse in (True, False):
            params = [nn.Parameter(torch.ones(3, device=DEVICE)) for _ in range(2)]
            optimizer = AdamW(params, lr=0.1, foreach=False)
            if fuse:
                fused(optimizer)
                params[0].grad = torch.ones_like(params[0])
                optimizer.prepare()  # type: ignore[attr-defined]
            scaler = torch.amp.GradScaler(DEVICE, init_scale=8.0)
            for value in (8.0, float("inf"), 16.0):
                for parameter in params:
                    scaler.scale(torch.ones(1, device=DEVICE))
                    parameter.grad = torch.full((3, 2), value, device=DEVICE)[:, 0]
                scaler.step(optimizer)
                scaler.update()
            results.append(params)
        torch.testing.assert_close(*results, rtol=1e-6, atol=1e-7)


class TestPrepared:
    def test_prepare_changes_nothing_and_refresh_sets_the_rate(self) -> None:
        params = parameters()
        optimizer: Any = AdamW(params)
        update = fused(optimizer)
        before = [parameter.detach().clone() for parameter in params]
        for parameter in params:
            parameter.grad = torch.ones_like(parameter)
        optimizer.prepare()
        optimizer.prepare()
        assert all(map(torch.equal, params, before))
        assert {state["step"].item() for state in optimizer.state.values()} == {0.0}
        (launch,) = update._launches.launches.values()
        assert all(state["step"].data_ptr() for state in optimizer.state.values())
        optimizer.param_groups[0]["lr"] = 0.25
        optimizer.refresh()
        assert {rule.lr for rule in launch.settings.rules} == {0.25}
        optimizer.step()
        assert {state["step"].item() for state in optimizer.state.values()} == {1.0}

    def test_equals_a_capturable_fused_adamw(self) -> None:
        ours, theirs = parameters(), parameters()
        optimizer: Any = AdamW(groups(ours))
        fused(optimizer)
        library = FusedAdamW(groups(theirs), capturable=True)
        optimizer.prepare()
        train(ours, optimizer, 4, skip=2)
        train(theirs, library, 4, skip=2)
        assert all(map(torch.equal, ours, theirs))

    def test_what_cannot_be_captured_raises(self) -> None:
        params = mixed()
        optimizer: Any = AdamW(params)
        fused(optimizer)
        params[2].grad = torch.ones_like(params[2])
        with pytest.raises(RuntimeError, match=r"torch\.float64"):
            optimizer.prepare()
        assert optimizer.state[params[2]]["step"].is_cpu
        optimizer.step()


@pytest.mark.parametrize("prepared", [False, True], ids=["eager", "prepared"])
def test_copies_are_written_with_the_weights(
    prepared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, copies = nn.Parameter(torch.randn(8, 4, device=DEVICE)), WeightCopies()
    optimizer: Any = AdamW([weight], lr=0.1)
    fused(optimizer, copies)
    copies.narrow((weight,), torch.float16)
    weight.grad = torch.ones_like(weight)
    with torch.no_grad():
        weight.mul_(2)
    if prepared:
        optimizer.prepare()
    (narrow,) = copies.narrow((weight,), torch.float16)
    torch.testing.assert_close(narrow, weight.detach().half(), rtol=0, atol=0)
    version = weight._version
    optimizer.step()
    assert weight._version > version
    monkeypatch.setattr(torch, "_foreach_copy_", None)
    (narrow,) = copies.narrow((weight,), torch.float16)
    torch.testing.assert_close(narrow, weight.detach().half(), rtol=0, atol=0)


def test_torch_compile_compiles_the_update_of_torch(launches: list[int]) -> None:
    ours, optimizer, theirs, reference = pair()
    fused(optimizer)
    step = torch.compile(lambda: optimizer.step(), backend="eager")
    for number in range(4):
        for params in (ours, theirs):
            for parameter in params:
                parameter.grad = torch.full_like(parameter, 1.0 + number)
        step()
        reference.step()
    assert not launches
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    train(ours, optimizer, 1)
    train(theirs, reference, 1)
    assert launches == [5]
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_wrappers_are_unwrapped(launches: list[int]) -> None:
    class Accelerated(Optimizer):
        """As Hugging Face Accelerate wraps an optimizer."""

        def __init__(self, optimizer: Optimizer) -> None:
            self.optimizer = optimizer

    class Lightning:
        """As Lightning wraps an optimizer."""

        def __init__(self, optimizer: Optimizer) -> None:
            self._optimizer = optimizer
            kinds = (type(self), type(optimizer))
            self.__class__ = type("LightningAdamW", kinds, {})  # type: ignore[assignment]

    for wrapper in (Accelerated, Lightning):
        params = parameters()
        inner = AdamW(params)
        update = fuse_optimizer(wrapper(inner))
        assert isinstance(update, FusedUpdate)
        assert update.optimizer is inner
        train(params, inner, 1)
    assert launches == [5, 5]


@pytest.mark.parametrize("prepared", [False, True], ids=["eager", "prepared"])
def test_sharded_parameters(prepared: bool, launches: list[int]) -> None:
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    backend = "nccl" if DEVICE == "cuda" else "gloo"
    distributed.init_process_group(backend, store=distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh(DEVICE, (1,))
        values = [parameter.detach() for parameter in parameters()]
        ours = [nn.Parameter(distribute_tensor(one, mesh, [Shard(0)])) for one in values]
        theirs = [nn.Parameter(one.clone()) for one in values]
        optimizer: Any = AdamW(ours)
        reference = AdamW(theirs)
        fused(optimizer)
        if prepared:
            optimizer.prepare()
        for step in range(3):
            for one, other in zip(ours, theirs, strict=True):
                other.grad = torch.full_like(other, step - 0.5)
                one.grad = distribute_tensor(other.grad, mesh, [Shard(0)])
            optimizer.step()
            reference.step()
        assert launches == [5, 5, 5]
        full = [one.full_tensor() for one in ours]  # type: ignore[attr-defined]
        torch.testing.assert_close(full, [one.detach() for one in theirs], rtol=1e-6, atol=1e-7)
    finally:
        distributed.destroy_process_group()
