"""Cache keys: calls that differ in a property that a cached entry depends on never share it.

Prepared launches of attention are replayed only on a GPU. Here the kernels are replaced by ones
that record how they are launched, so that the real cache, keys and replays run on a CPU. Tensors on
the meta device stand for those of a second GPU.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from launch_recorder import DEVICE, B, D, H, Recorder, S, dense, recording
from stepscope.attention import attention, flex
from stepscope.attention.triton import launch as triton_launch
from stepscope.kernels import autotune
from stepscope.kernels.weight_copies import WeightCopies
from stepscope.optim import FusedAdamW
from stepscope.optim.launches import TensorUpdate
from stepscope.torch_tools.triton_available import on_its_device, tf32_is_enabled


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return recording(monkeypatch)


NAMES = ("q", "k", "v", "grad", "out")


def run(recorder: Recorder, **change: Any) -> None:
    """Run a forward and a backward, with some properties changed."""
    dtype, device = change.get("dtype", torch.float32), change.get("device", DEVICE)
    recorder.dtype = dtype
    size = {name: change[name] for name in ("b", "h", "s", "d") if name in change}
    keys = size | {k[4:]: n for k, n in change.items() if k.startswith("key_")}
    q, k, v, grad, out = (
        dense(change.get(name, ""), dtype, device, **(keys if name in "kv" else size))
        for name in NAMES
    )
    if change.get("lse") == "unaligned":
        lse = torch.empty(q.numel() // q.shape[-1] + 1, device=device)[1:].view(q.shape[:-1])
    else:
        lse = torch.empty(q.shape[:-1], device=device)
    settings = {
        "scale": change.get("scale", 0.125),
        "causal": change.get("causal", False),
        "shift": change.get("shift", 0),
    }
    if any(name in change for name in triton_launch.Rules._fields):
        settings["rules"] = rules(q.shape[-2], k.shape[-2], device, change)
    if change.get("projection"):
        projected = torch.empty(B, S, 3, H, D, dtype=dtype, device=device)
        q, k, v = (one.transpose(1, 2) for one in projected.unbind(2))
    with tf32(change.get("tf32", False)):
        triton_launch.forward(q, k, v, **settings)
        triton_launch.backward(grad, q, k, v, out, lse, **settings)


def rules(rows: int, keys: int, device: str, change: dict[str, Any]) -> triton_launch.Rules:
    """Create rules: `key_intervals` and `query_intervals` are numbers of batches, `slopes` and
    `sinks` layouts."""
    fields: dict[str, Any] = {}
    for name, length in (("key_intervals", rows), ("query_intervals", keys)):
        if name in change:
            fields[name] = torch.zeros(change[name], 2, length, dtype=torch.int32, device=device)
    for name in ("slopes", "sinks"):
        if name in change:
            first = 1 if change[name] == "unaligned" else 0
            fields[name] = torch.zeros(H + first, device=device)[first:]
    return triton_launch.Rules(**fields, softcap=change.get("softcap"))


@contextmanager
def tf32(on: bool) -> Iterator[None]:
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32" if on else "ieee"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


CHANGES: dict[str, dict[str, Any]] = {
    **{f"{name} transposed": {name: "transposed"} for name in NAMES},
    **{f"{name} unaligned": {name: "unaligned"} for name in NAMES},
    "lse unaligned": {"lse": "unaligned"},
    "k unaligned and not q": {"q": "", "k": "unaligned"},
    "all transposed": dict.fromkeys(NAMES, "transposed"),
    "bfloat16": {"dtype": torch.bfloat16},
    "float16": {"dtype": torch.float16},
    "tf32": {"tf32": True},
    "integer scale": {"scale": 1},
    "another scale": {"scale": 0.5},
    "causal": {"causal": True},
    "causal with an offset": {"causal": True, "shift": 3},
    "longer": {"s": 48},
    "one row": {"s": 1},
    "more keys": {"key_s": 48},
    "shared key heads": {"key_h": 2},
    "head dimension": {"d": 80},
    "batch": {"b": 1},
    "device": {"device": "meta"},
    "one projection": {"projection": True},
    "intervals": {"key_intervals": 1, "query_intervals": 1},
    "intervals of each batch": {"key_intervals": B, "query_intervals": B},
    "soft cap": {"softcap": 3.0},
    "another soft cap": {"softcap": 4.0},
    "slopes": {"slopes": ""},
    "slopes unaligned": {"slopes": "unaligned"},
    "sinks": {"sinks": ""},
    "sinks unaligned": {"sinks": "unaligned"},
}
BASES: dict[str, dict[str, Any]] = {
    "float32": {}, "bfloat16": {"dtype": torch.bfloat16}, "tf32": {"tf32": True},
    "q unaligned": {"dtype": torch.bfloat16, "q": "unaligned"},
    "causal": {"causal": True, "scale": 1},
    "one projection": {"projection": True, "dtype": torch.bfloat16},
    "rules": {"key_intervals": 1, "query_intervals": 1, "slopes": "", "sinks": "", "softcap": 2.0},
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("base", BASES)
def test_a_replay_has_the_arguments_of_the_compilation(
    base: str, name: str, recorder: Recorder
) -> None:
    """Both orders of a pair of calls that differ in one property."""
    calls = (BASES[base], BASES[base] | CHANGES[name])
    for first, second in (calls, calls[::-1]):
        triton_launch._PREPARED.clear()
        triton_launch._SPLITTERS.clear()
        for change in (first, second, first):
            run(recorder, **change)


@pytest.mark.parametrize("name", ["same", *CHANGES])
def test_the_same_call_again_is_a_replay(name: str, recorder: Recorder) -> None:
    change = CHANGES.get(name, {})
    run(recorder, **change)
    compiled = recorder.compiled
    run(recorder, **change)
    assert recorder.compiled == compiled
    assert recorder.replayed >= 3


def test_only_the_scale_may_change_in_a_replay(recorder: Recorder) -> None:
    run(recorder, scale=1)
    compiled = recorder.compiled
    run(recorder, scale=0.5)
    assert recorder.compiled == compiled


def test_planes_of_every_layout_and_device_have_a_separate_key(recorder: Recorder) -> None:
    variants = [dense(layout) for layout in ("", "transposed", "unaligned")]
    for x in (*variants, dense(device="meta"), dense(s=48), dense(d=48)):
        before = len(triton_launch._SPLITTERS)
        for _ in range(2):
            triton_launch._planes(x)
        assert len(triton_launch._SPLITTERS) == before + 1
    assert recorder.compiled == recorder.replayed == 6


class TestDevice:
    """Triton launches on the current device, whatever device the pointers belong to."""

    @pytest.mark.parametrize("current", [0, 1])
    def test_the_device_of_the_tensor_is_current_during_a_launch(
        self, current: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        entered: list[torch.device] = []

        @contextmanager
        def entering(device: torch.device) -> Iterator[None]:
            entered.append(device)
            yield

        monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
        monkeypatch.setattr(torch.cuda, "device", entering)
        launch = on_its_device(lambda _, *, factor: factor * 2)
        x = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 1))
        assert launch(x, factor=3) == launch([x], factor=3) == 6
        assert entered == ([] if current == 1 else [x.device] * 2)

    @pytest.mark.parametrize(
        "module", ["norm", "activation", "rope", "embedding", "cross_entropy", "scale"]
    )
    def test_every_launcher_of_a_fused_kernel_sets_the_device(self, module: str) -> None:
        imported = importlib.import_module(f"stepscope.kernels.triton.{module}")
        launchers = [
            function
            for _, function in inspect.getmembers(imported, inspect.isfunction)
            if function.__module__ == imported.__name__ and "[(" in inspect.getsource(function)
        ]
        assert launchers
        for function in launchers:
            assert "@on_its_device" in inspect.getsource(function), function.__name__


@contextmanager
def deterministic(enabled: bool) -> Iterator[None]:
    torch.use_deterministic_algorithms(enabled)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


class TestDispatch:
    """`attention` caches its choice of implementation."""

    @pytest.fixture(autouse=True)
    def dispatch_cache(self, monkeypatch: pytest.MonkeyPatch) -> dict[Any, Any]:
        cache: dict[Any, Any] = {}
        monkeypatch.setattr("stepscope.attention.api._DISPATCH_CACHE", cache)
        return cache

    @pytest.mark.parametrize(
        "change",
        [
            {"impl": "tiled"}, {"is_causal": True}, {"scale": 0.5}, {"scale": -0.125},
            {"causal_align": "bottom-right"}, {"dtype": torch.float64}, {"device": "meta"},
            {"s": 16}, {"h": 2}, {"d": 32}, {"deterministic": True},
            {"autocast": torch.bfloat16}, {"autocast": torch.float16},
        ],
        ids=str,
    )  # fmt: skip
    def test_a_call_that_differs_is_dispatched_again(
        self, change: dict[str, Any], dispatch_cache: dict[Any, Any]
    ) -> None:
        def call(**how: Any) -> None:
            shape = {name: how.pop(name) for name in ("s", "h", "d", "dtype", "device")
                     if name in how}  # fmt: skip
            x, narrow = dense(**shape), how.pop("autocast", None)
            autocast = torch.autocast(DEVICE, narrow, enabled=narrow is not None)
            with autocast, deterministic(how.pop("deterministic", False)):
                attention(x, x, x, **({"scale": 0.125, "impl": "reference"} | how))

        call()
        call()
        assert len(dispatch_cache) == 1
        call(**change)
        assert len(dispatch_cache) == 2

    @pytest.mark.parametrize("impl", ["sdpa", "reference", "tiled", "auto"])
    def test_calls_under_autocast_are_cached(
        self, impl: str, dispatch_cache: dict[Any, Any]
    ) -> None:
        """By the dtypes of the inputs and that of autocast."""
        leaves = [torch.randn(1, 2, 8, 16, requires_grad=True) for _ in range(3)]
        mixed = [leaves[0], leaves[1].detach().bfloat16().requires_grad_(), leaves[2]]

        def call(inputs: list[Tensor], narrow: torch.dtype | None) -> list[Tensor]:
            with torch.autocast(DEVICE, narrow, enabled=narrow is not None):
                out = attention(*inputs, is_causal=True, impl=impl)
            return [out, *torch.autograd.grad(out.float().square().sum(), inputs)]

        calls = [
            (leaves, None), (leaves, torch.bfloat16), (leaves, torch.float16),
            (mixed, torch.bfloat16),
        ]  # fmt: skip
        first = [call(*arguments) for arguments in calls]
        assert len(dispatch_cache) == 4
        for arguments, expected in [*zip(calls, first, strict=True)][::-1]:
            found = call(*arguments)
            assert found[0].dtype == (arguments[1] or torch.float32)
            torch.testing.assert_close(found, expected, rtol=0, atol=0)
        with pytest.raises(ValueError, match="k is bfloat16 and q is float32"):
            call(mixed, None)
        ints = [x.detach().int() for x in leaves]
        for _ in range(2):
            with pytest.raises(ValueError, match="q is int32"):
                call(ints, torch.bfloat16)
        assert len(dispatch_cache) == 4

    @pytest.mark.parametrize("impl", ["sdpa", "reference", "tiled", "auto"])
    def test_one_cache_entry_serves_every_layout(self, impl: str) -> None:
        q, k, v = (torch.randn(B, S, H, D).transpose(1, 2) for _ in range(3))
        dense = [x.contiguous() for x in (q, k, v)]
        expected = attention(*dense, is_causal=True, impl=impl)
        actual = attention(q, k, v, is_causal=True, impl=impl)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)

    def test_sdpa_is_looked_up_at_each_call(self, monkeypatch: pytest.MonkeyPatch) -> None:
        x = torch.randn(1, 2, 8, 16)
        attention(x, x, x, impl="sdpa")
        name = "torch.nn.functional.scaled_dot_product_attention"
        monkeypatch.setattr(name, lambda q, *_, **__: torch.full_like(q, 7.0))
        assert (attention(x, x, x, impl="sdpa") == 7.0).all()

    @pytest.mark.parametrize("impl", ["sdpa", "reference", "tiled", "triton", "auto"])
    def test_a_tensor_scale_raises(self, impl: str) -> None:
        x = torch.randn(1, 2, 8, 16)
        with pytest.raises(ValueError, match="scale is a tensor"):
            attention(x, x, x, scale=torch.tensor(0.5), impl=impl)  # type: ignore[arg-type]


class TestPrecision:
    @pytest.mark.parametrize("precision", ["tf32", "ieee"])
    def test_the_newer_torch_setting_is_respected(self, precision: str) -> None:
        with tf32(precision == "tf32"):
            assert tf32_is_enabled() == (precision == "tf32")

    @pytest.mark.parametrize(("precision", "fast"), [("high", True), ("highest", False)])
    def test_the_older_torch_setting_is_respected(self, precision: str, fast: bool) -> None:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(precision)
        try:
            assert tf32_is_enabled() == fast
        finally:
            torch.set_float32_matmul_precision(before)


class TestAutotunedMatmuls:
    CHANGES: ClassVar[dict[str, Callable[[Tensor, Tensor, Tensor], tuple[Any, ...]]]] = {
        "a transposed": lambda out, a, b: (out, dense_like(a.T).T, b, False),
        "b transposed": lambda out, a, b: (out, a, dense_like(b.T).T, False),
        "a with a row stride": lambda out, a, b: (out, with_row_stride(a), b, False),
        "b with a row stride": lambda out, a, b: (out, a, with_row_stride(b), False),
        "out with a row stride": lambda out, a, b: (with_row_stride(out), a, b, False),
        "adds": lambda out, a, b: (out, a, b, True),
        "a wide output": lambda out, a, b: (out.float(), a, b, False),
        "dtype": lambda out, a, b: (out.half(), a.half(), b.half(), False),
        "rows": lambda out, a, b: (dense_like(out[:128]), dense_like(a[:128]), b, False),
        "inner size": lambda out, a, b: (out, dense_like(a[:, :128]), dense_like(b[:128]), False),
        "columns": lambda out, a, b: (dense_like(out[:, :128]), a, dense_like(b[:, :128]), False),
        "device": lambda out, a, b: (out.to("meta"), a.to("meta"), b.to("meta"), False),
    }

    @pytest.fixture(autouse=True)
    def any_alignment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The CPU allocator aligns to fewer bytes than the GPU allocator."""
        monkeypatch.setattr(autotune, "ALIGNMENT", 1)

    @pytest.mark.parametrize("name", CHANGES)
    def test_a_different_matmul_has_a_different_key(self, name: str) -> None:
        out, a, b = (torch.empty(256, 256, dtype=torch.bfloat16) for _ in range(3))
        key = autotune._key(out, a, b, False)
        assert key is not None
        assert key == autotune._key(dense_like(out), dense_like(a), dense_like(b), False)
        other = autotune._key(*self.CHANGES[name](out, a, b))
        assert other is not None
        assert other != key

    def test_tensors_on_two_devices_are_left_to_torch(self) -> None:
        out, a, b = (torch.empty(256, 256, dtype=torch.bfloat16) for _ in range(3))
        assert autotune._key(out, a.to("meta"), b, False) is None

    def test_an_unaligned_address_is_left_to_torch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(autotune, "ALIGNMENT", 256)
        buffer = torch.empty(256 * 256 + 256, dtype=torch.bfloat16)
        start = -buffer.data_ptr() % 256 // 2
        x = buffer[start : start + 256 * 256].view(256, 256)
        assert autotune._key(x, x, x, False) is not None
        y = buffer[start + 1 : start + 1 + 256 * 256].view(256, 256)
        assert [autotune._key(*given, False) for given in ((y, x, x), (x, y, x), (x, x, y))] == (
            [None] * 3
        )

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
    def test_the_setting_for_16_bit_reductions_is_respected(self, dtype: torch.dtype) -> None:
        matmul = torch.backends.cuda.matmul
        name = {torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype]
        setting = f"allow_{name}_reduced_precision_reduction"
        before = getattr(matmul, setting)
        try:
            for allowed in (True, False):
                setattr(matmul, setting, allowed)
                assert autotune._may_reduce_in(dtype) == allowed
        finally:
            setattr(matmul, setting, before)


def dense_like(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def with_row_stride(x: Tensor) -> Tensor:
    return torch.empty(x.shape[0], x.shape[1] + 8, dtype=x.dtype)[:, : x.shape[1]]


class TestAddressTable:
    """A table of `FusedAdamW` is reused while its key and its rows are the same."""

    def test_every_tensor_and_setting_is_in_the_row(self) -> None:
        def row_of(**change: Any) -> Any:
            device = change.get("device", "cpu")
            kinds = [change.get(name, torch.float32) for name in ("parameter", "gradient", "mean")]
            x, g, m, s = (tensors[name] for name in ("x", "g", "m", "s"))
            x, g = x.to(device, kinds[0]), g.to(device, kinds[1])
            m, s = m.to(device, kinds[2]), s.to(device, kinds[2])
            x, g, m, s = (
                y.clone() if change.get(f"new {n}") else y
                for n, y in zip("xgms", (x, g, m, s), strict=True)
            )
            alive.extend((x, g, m, s))
            copy = tensors["copy"] if change.get("copy") else None
            update = TensorUpdate(x, x, g, m, s, copy, {}, {})
            return update.key, update.row(change.get("settings", 0))

        alive: list[Tensor] = []  # so that no address is reused
        tensors = {name: torch.zeros(8) for name in ("x", "g", "m", "s", "copy")}
        base = row_of()
        assert base == row_of()
        for change in (
            {"parameter": torch.float16}, {"gradient": torch.float16}, {"mean": torch.float16},
            {"device": "meta"}, {"copy": True}, {"settings": 1},
            {"new x": True}, {"new g": True}, {"new m": True}, {"new s": True},
        ):  # fmt: skip
            assert row_of(**change) != base, change

    def test_buffers_of_a_captured_step_outlive_a_change_of_the_gradients(self) -> None:
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
        params = [nn.Parameter(torch.ones(size, device=device_type)) for size in (5, 3)]
        optimizer = FusedAdamW(params, capturable=True)
        self.set_gradients(params)
        optimizer.step()
        (captured,) = optimizer._launches.launches.values()
        # As `step` does in a capture.
        optimizer._launches.captured.append(captured)
        counts = [optimizer.state[parameter]["step"] for parameter in params]
        self.set_gradients(params)
        optimizer.step()
        (now,) = optimizer._launches.launches.values()
        assert now.table is not captured.table
        assert now.settings is captured.settings
        params[1].grad = None
        optimizer.step()
        assert [optimizer.state[parameter]["step"] for parameter in params] == counts
        assert [count.item() for count in counts] == [3, 2]
        # A later replay continues from these counts.
        captured.settings.advance()
        assert [count.item() for count in counts] == [4, 3]
        optimizer.param_groups[0]["lr"] = 0.25
        optimizer.refresh()
        assert {rule.lr for rule in captured.settings.rules} == {0.25}

    @staticmethod
    def set_gradients(params: list[nn.Parameter]) -> None:
        before = [parameter.grad for parameter in params]
        for parameter in params:
            parameter.grad = torch.ones_like(parameter)
        del before


class TestWeightCopies:
    def test_new_memory_at_the_same_address_is_detected(self) -> None:
        buffer = bytearray(4 * 6)
        weight = nn.Parameter(torch.frombuffer(buffer, dtype=torch.float32).view(2, 3))
        copies = WeightCopies()
        (first,) = copies.narrow((weight,), torch.float16)
        assert not first.any()
        address, version = weight.data_ptr(), weight._version
        torch.frombuffer(buffer, dtype=torch.float32).fill_(3.0)
        weight.data = torch.frombuffer(buffer, dtype=torch.float32).view(2, 3)
        assert (weight.data_ptr(), weight._version) == (address, version)
        (second,) = copies.narrow((weight,), torch.float16)
        assert (second == 3.0).all()

    def test_each_dtype_has_its_own_copy(self) -> None:
        weight = nn.Parameter(torch.full((2, 3), 1 / 3))
        copies = WeightCopies()
        for dtype in (torch.float16, torch.bfloat16, torch.float16):
            (copied,) = copies.narrow((weight,), dtype)
            assert torch.equal(copied, weight.detach().to(dtype))


def test_a_block_mask_created_in_inference_mode_is_usable_in_training() -> None:
    flex._cached_mask.cache_clear()
    with torch.inference_mode():
        mask = flex._mask_for(128, 128, 0, torch.device("cpu"))
    assert mask is not None
    assert not mask.kv_num_blocks.is_inference()
    assert flex._mask_for(128, 128, 0, torch.device("cpu")) is mask
    for seq_q, seq_k, offset in ((128, 256, 0), (256, 128, 0), (128, 128, 1)):
        assert flex._mask_for(seq_q, seq_k, offset, torch.device("cpu")) is not mask
