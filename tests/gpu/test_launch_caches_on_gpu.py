"""Launch and dispatch caches: a call gives what it gives in a process of its own, whatever was
called before it."""

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
from launch_cases import EXACT, FAMILIES, MOST_VARIANTS, Results, clear_caches, draw
from stepscope.attention import attention
from stepscope.kernels.matmul import fused_linear
from stepscope.kernels.weight_copies import WeightCopies
from stepscope.optim import AdamW, FusedAdamW

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.timeout(400),
]
AT_ONCE = min(8, os.cpu_count() or 1)
BETWEEN_CHANGES = {
    "attention in float32": [("q transposed", "v transposed"), ("scale 1", "scale 0.5")],
    "attention in bfloat16": [("q unaligned", "k unaligned"), ("scale 1", "scale 0.5")],
}
"""Pairs of which neither is the base."""
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
    """Every variant's results from a process that ran no other variant of its family."""
    folder = tmp_path_factory.mktemp("fresh")

    def child(number: int) -> dict[tuple[str, str], Results]:
        path = folder / f"{number}.pt"
        command = [sys.executable, str(Path(launch_cases.__file__)), str(number), str(path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-4000:]
        found: dict[tuple[str, str], Results] = torch.load(path)
        return found

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return {k: v for part in pool.map(child, range(MOST_VARIANTS)) for k, v in part.items()}


@pytest.mark.parametrize(("family", "one", "other"), PAIRS, ids=lambda name: name)
def test_a_pair_of_calls_that_differ_in_one_property(
    family: str, one: str, other: str, fresh: dict[tuple[str, str], Results]
) -> None:
    for names in ((one, other, one), (other, one, other)):
        clear_caches()
        for place, name in enumerate(names):
            found = FAMILIES[family][name]()
            hold(family, found, fresh[family, name], f"{name}, call {place + 1} of {names}")


def hold(family: str, found: Results, expected: Results, what: str) -> None:
    assert len(found) == len(expected)
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        message = f"{family}: result {number} of {what}"
        assert ours.dtype == theirs.dtype, message
        assert ours.shape == theirs.shape, message
        if family in EXACT:
            assert torch.equal(ours, theirs), message
            continue
        # Another kernel of cuBLAS may round another way.
        far = (ours.double() - theirs.double()).abs().max().item()
        eps = torch.finfo(ours.dtype).eps
        room = eps**0.5 if ours.dtype == torch.float32 else 4 * eps
        assert far <= room * theirs.double().abs().max().item(), message


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_other_tensors_left_at_an_address_is_not_read(dtype: torch.dtype) -> None:
    """Descriptors of tensors are kept by address: freed, then taken by another shape and dtype."""

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


def test_weights_that_were_reallocated_are_read_again() -> None:
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
            found = fused_linear(x, (weight,), copies)
            expected = fused_linear(x, (weight,), WeightCopies())
            assert torch.equal(found, expected), seed


class TestFusedAdamW:
    SIZES = (5000, 3, 1024)

    def parameters(self, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
        return [nn.Parameter(draw(size).to("cuda", dtype)) for size in self.SIZES]

    def give_gradients(self, held: list[nn.Parameter], step: int, layout: str = "") -> None:
        for number, each in enumerate(held):
            drawn = draw(*each.shape, seed=10 * step + number)
            each.grad = launch_cases.placed(drawn, each.dtype, layout)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("capturable", [False, True])
    def test_tensors_that_move(self, capturable: bool, dtype: torch.dtype) -> None:
        """Gradients and parameters at new addresses, some of them unaligned."""
        still, moving = self.parameters(dtype), self.parameters(dtype)
        calm, restless = (FusedAdamW(held, capturable=capturable) for held in (still, moving))
        for step in range(6):
            self.give_gradients(still, step)
            if step in (2, 4):
                for each in moving:
                    each.grad = None
                    each.data = each.data.clone()
                torch.cuda.empty_cache()
            self.give_gradients(moving, step, launch_cases.UNALIGNED if step in (1, 2) else "")
            calm.step()
            restless.step()
            # Loads of other widths may be contracted otherwise, to a unit in the last place.
            room = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 1e-7}
            torch.testing.assert_close([*moving], [*still], **room)

    def test_a_captured_step_beside_steps_that_are_not(self) -> None:
        """A replay, steps with gradients elsewhere and for fewer parameters, and replays again."""
        held, plain = self.parameters(), self.parameters()
        optimizer, eager = FusedAdamW(held, capturable=True), FusedAdamW(plain)
        self.give_gradients(held, 0)
        static = [each.grad for each in held]
        optimizer.step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            optimizer.step()

        def fill(step: int) -> None:
            for number, (buffer, each) in enumerate(zip(static, held, strict=True)):
                assert buffer is not None
                buffer.copy_(draw(*each.shape, seed=10 * step + number))

        def replay() -> None:
            graph.replay()

        def elsewhere(skipped: int | None) -> Callable[[], None]:
            def step() -> None:
                for number, (buffer, each) in enumerate(zip(static, held, strict=True)):
                    assert buffer is not None
                    each.grad = None if number == skipped else buffer.clone()
                optimizer.step()

            return step

        self.give_gradients(plain, 0)
        eager.step()
        litter = []
        for step, act in enumerate(
            (replay, elsewhere(None), replay, elsewhere(1), replay, replay), start=1
        ):
            fill(step)
            act()
            self.give_gradients(plain, step)
            if step == 4:
                plain[1].grad = None
            eager.step()
            torch.cuda.empty_cache()
            # What a replay should not have lost would be overwritten by these.
            litter += [torch.full((size,), -1, device="cuda") for size in (21, 64, 512) * 8]
            for number, (one, other) in enumerate(zip(held, plain, strict=True)):
                torch.testing.assert_close(
                    one, other, rtol=2e-6, atol=1e-7, msg=lambda said, s=step, n=number: (
                        f"step {s}, parameter {n}: {said}"
                    ),
                )  # fmt: skip
        counts = [optimizer.state[each]["step"].item() for each in held]
        assert counts == [eager.state[each]["step"].item() for each in plain] == [7, 6, 7]

    @pytest.mark.parametrize("rule", [AdamW, FusedAdamW])
    def test_a_step_that_counts_on_the_host_is_not_captured(self, rule: type[AdamW]) -> None:
        held = self.parameters()
        self.give_gradients(held, 0)
        optimizer = rule(held)
        optimizer.step()
        before = [each.detach().clone() for each in held]
        with (
            pytest.raises(RuntimeError, match="capturable=True"),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            optimizer.step()
        torch.cuda.synchronize()
        assert all(map(torch.equal, held, before))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
def test_tensors_of_a_device_that_is_not_the_current_one() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        made = []
        for device in ("cuda:0", "cuda:1"):
            q, k, v = (draw(2, 4, 256, 64, seed=n).to(device, dtype) for n in range(3))
            made += [attention(q, k, v, impl="triton").cpu() for _ in range(2)]
        assert all(torch.equal(each, made[0]) for each in made)
