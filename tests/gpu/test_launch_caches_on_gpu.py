"""Launch and dispatch caches: a call gives the result of a fresh process, whatever was called
before."""

from __future__ import annotations

import gc
import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import launch_cases
from launch_cases import EXACT, FAMILIES, MAX_VARIANTS, Results, clear_caches, draw
from stepscope.attention import attention
from stepscope.kernels.matmul import fused_linear
from stepscope.kernels.weight_copies import WeightCopies
from stepscope.optim import AdamW, FusedAdamW

pytestmark = pytest.mark.timeout(400)
AT_ONCE = min(8, os.cpu_count() or 1)
BETWEEN_RULES = [
    ("window", "another window"), ("documents", "other documents"),
    ("documents", "documents of each batch"), ("prefix", "prefix of each batch"),
    ("soft cap", "another soft cap"), ("slopes", "other slopes"), ("sinks", "other sinks"),
]  # fmt: skip
BETWEEN_CHANGES = {
    "attention in float32": [("q transposed", "v transposed"), ("scale 1", "scale 0.5")],
    "attention in bfloat16": [("q unaligned", "k unaligned"), ("scale 1", "scale 0.5")],
    "rules in float32": BETWEEN_RULES,
    "rules in bfloat16": BETWEEN_RULES,
}
"""Pairs in which neither is the base."""
PAIRS = [
    (family, *pair)
    for family, variants in FAMILIES.items()
    for pair in (
        *((next(iter(variants)), other) for other in list(variants)[1:]),
        *BETWEEN_CHANGES.get(family, ()),
    )
]


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Results]:
    """Results of every variant from a process that ran no other variant of its family."""
    folder = tmp_path_factory.mktemp("fresh")

    def child(number: int) -> dict[tuple[str, str], Results]:
        path = folder / f"{number}.pt"
        command = [sys.executable, str(Path(launch_cases.__file__)), str(number), str(path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-4000:]
        loaded: dict[tuple[str, str], Results] = torch.load(path)
        return loaded

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return {k: v for part in pool.map(child, range(MAX_VARIANTS)) for k, v in part.items()}


@pytest.mark.parametrize(("family", "one", "other"), PAIRS, ids=lambda name: name)
def test_a_pair_of_calls_that_differ_in_one_property(
    family: str, one: str, other: str, fresh: dict[tuple[str, str], Results]
) -> None:
    for names in ((one, other, one), (other, one, other)):
        clear_caches()
        for index, name in enumerate(names):
            actual = FAMILIES[family][name]()
            check(family, actual, fresh[family, name], f"{name}, call {index + 1} of {names}")


def check(family: str, actual: Results, expected: Results, case: str) -> None:
    assert len(actual) == len(expected)
    for number, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
        message = f"{family}: result {number} of {case}"
        assert ours.dtype == theirs.dtype, message
        assert ours.shape == theirs.shape, message
        if family in EXACT:
            assert torch.equal(ours, theirs), message
            continue
        # Another cuBLAS kernel may round differently.
        error = (ours.double() - theirs.double()).abs().max().item()
        eps = torch.finfo(ours.dtype).eps
        tolerance = eps**0.5 if ours.dtype == torch.float32 else 4 * eps
        assert error <= tolerance * theirs.double().abs().max().item(), message


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_stale_descriptors_of_an_address_are_not_used(dtype: torch.dtype) -> None:
    """Descriptors are cached by address, which may be reused by another shape and dtype."""

    def call(length: int, kind: torch.dtype, seed: int) -> Tensor:
        q, k, v = (draw(2, 4, length, 64, seed=seed + n).to("cuda", kind) for n in range(3))
        return attention(q, k, v, is_causal=True, impl="triton").cpu()

    variants = list(itertools.product((256, 128, 512), (dtype, torch.float16), (0, 10)))
    expected = {}
    for variant in variants:
        clear_caches()
        expected[variant] = call(*variant)
    clear_caches()
    for turn in range(3):
        if turn == 1:
            gc.collect()
            torch.cuda.empty_cache()
        for variant in variants[:: 1 if turn % 2 else -1]:
            assert torch.equal(call(*variant), expected[variant]), variant


def test_reallocated_weights_are_cast_again() -> None:
    weight = nn.Parameter(draw(128, 64).cuda())
    x = draw(32, 64, seed=1).to("cuda", torch.bfloat16)
    copies = WeightCopies()
    with torch.autocast("cuda", torch.bfloat16):
        for seed in range(6):
            # Freed first, so that the new one gets the same address.
            weight.data = torch.empty(0, device="cuda")
            if seed == 3:
                torch.cuda.empty_cache()
            weight.data = draw(128, 64, seed=seed).cuda()
            actual = fused_linear(x, (weight,), copies)
            expected = fused_linear(x, (weight,), WeightCopies())
            assert torch.equal(actual, expected), seed


class TestFusedAdamW:
    SIZES = (5000, 3, 1024)

    def parameters(self, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
        return [nn.Parameter(draw(size).to("cuda", dtype)) for size in self.SIZES]

    def set_gradients(self, params: list[nn.Parameter], step: int, layout: str = "") -> None:
        for number, parameter in enumerate(params):
            drawn = draw(*parameter.shape, seed=10 * step + number)
            parameter.grad = launch_cases.placed(drawn, parameter.dtype, layout)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("capturable", [False, True])
    def test_tensors_at_new_addresses(self, capturable: bool, dtype: torch.dtype) -> None:
        """Gradients and parameters at new addresses, some of them unaligned."""
        still, moving = self.parameters(dtype), self.parameters(dtype)
        reference, optimizer = (
            FusedAdamW(params, capturable=capturable) for params in (still, moving)
        )
        for step in range(6):
            self.set_gradients(still, step)
            if step in (2, 4):
                for parameter in moving:
                    parameter.grad = None
                    parameter.data = parameter.data.clone()
                torch.cuda.empty_cache()
            self.set_gradients(moving, step, launch_cases.UNALIGNED if step in (1, 2) else "")
            reference.step()
            optimizer.step()
            # With other load widths the compiler may contract differently, by 1 ulp.
            tolerance = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 1e-7}
            torch.testing.assert_close([*moving], [*still], **tolerance)

    def test_a_captured_step_between_eager_steps(self) -> None:
        """Replays, interleaved with steps whose gradients have other addresses or are missing."""
        params, plain = self.parameters(), self.parameters()
        optimizer, eager = FusedAdamW(params, capturable=True), FusedAdamW(plain)
        self.set_gradients(params, 0)
        static = [parameter.grad for parameter in params]
        optimizer.step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            optimizer.step()

        def fill(step: int) -> None:
            for number, (buffer, parameter) in enumerate(zip(static, params, strict=True)):
                assert buffer is not None
                buffer.copy_(draw(*parameter.shape, seed=10 * step + number))

        def replay() -> None:
            graph.replay()

        def elsewhere(skipped: int | None) -> Callable[[], None]:
            def step() -> None:
                for number, (buffer, parameter) in enumerate(zip(static, params, strict=True)):
                    assert buffer is not None
                    parameter.grad = None if number == skipped else buffer.clone()
                optimizer.step()

            return step

        self.set_gradients(plain, 0)
        eager.step()
        litter = []
        for step, act in enumerate(
            (replay, elsewhere(None), replay, elsewhere(1), replay, replay), start=1
        ):
            fill(step)
            act()
            self.set_gradients(plain, step)
            if step == 4:
                plain[1].grad = None
            eager.step()
            torch.cuda.empty_cache()
            # These would overwrite buffers of the graph that were freed too early.
            litter += [torch.full((size,), -1, device="cuda") for size in (21, 64, 512) * 8]
            for number, (one, other) in enumerate(zip(params, plain, strict=True)):
                torch.testing.assert_close(
                    one,
                    other,
                    rtol=2e-6,
                    atol=1e-7,
                    msg=lambda text, s=step, n=number: f"step {s}, parameter {n}: {text}",
                )
        counts = [optimizer.state[parameter]["step"].item() for parameter in params]
        assert counts == [eager.state[parameter]["step"].item() for parameter in plain] == [7, 6, 7]

    @pytest.mark.parametrize("rule", [AdamW, FusedAdamW])
    def test_a_step_with_a_host_step_count_cannot_be_captured(self, rule: type[AdamW]) -> None:
        params = self.parameters()
        self.set_gradients(params, 0)
        optimizer = rule(params)
        optimizer.step()
        before = [parameter.detach().clone() for parameter in params]
        with (
            pytest.raises(RuntimeError, match="capturable=True"),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            optimizer.step()
        torch.cuda.synchronize()
        assert all(map(torch.equal, params, before))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
def test_tensors_on_a_device_that_is_not_current() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        outputs = []
        for device in ("cuda:0", "cuda:1"):
            q, k, v = (draw(2, 4, 256, 64, seed=n).to(device, dtype) for n in range(3))
            outputs += [attention(q, k, v, impl="triton").cpu() for _ in range(2)]
        assert all(torch.equal(parameter, outputs[0]) for parameter in outputs)
