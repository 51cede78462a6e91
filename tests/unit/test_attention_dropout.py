"""Dropout of attention probabilities: random words, statistics, the naive form and repeatability.

Its gradients in every implementation are in `test_attention_rules.py` and `test_triton_rules.py`.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from attention_inputs import draw
from attention_rules import SEED
from stepscope.attention import ScoreRules, attention, explain
from stepscope.attention.dropout import _philox, kept

OURS = ("reference", "triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def mask(dropout: float, heads: int, rows: int, keys: int, seed: Tensor = SEED) -> Tensor:
    return kept(dropout, seed, *map(torch.arange, (heads, rows, keys)))


def words(counter: list[int], seed: int) -> list[int]:
    signed = seed - 2**64 if seed >= 2**63 else seed
    parts = _philox([torch.tensor([part]) for part in counter], torch.tensor(signed))
    return [int(part) for part in parts]


class TestMask:
    def test_words_are_those_of_the_published_generator(self) -> None:
        """Known answers of Philox 4×32 with 10 rounds, published with Random123."""
        assert words([0] * 4, 0) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
        ones = 0xFFFFFFFF
        assert words([ones] * 4, ones << 32 | ones) == [
            0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD,
        ]  # fmt: skip
        counter = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344]
        assert words(counter, 0x299F31D0 << 32 | 0xA4093822) == [
            0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1,
        ]  # fmt: skip

    @pytest.mark.parametrize("dropout", [0.1, 0.5, 0.9])
    def test_every_row_key_and_head_loses_its_share(self, dropout: float) -> None:
        heads, rows, keys = 8, 128, 256
        lost = 1.0 - mask(dropout, heads, rows, keys).double()
        for dims in ((1, 2), (0, 2), (0, 1), (0, 1, 2)):
            share = lost.mean(dims)
            count = lost.numel() / share.numel()
            deviation = math.sqrt(dropout * (1 - dropout) / count)
            assert (share - dropout).abs().max() < 4.5 * deviation

    def test_positions_are_independent(self) -> None:
        values = mask(0.5, 4, 256, 256).double() * 2 - 1
        shifted = [
            (values[:, 1:], values[:, :-1]),
            (values[..., 1:], values[..., :-1]),
            # Positions that share a counter.
            (values[:, 8:16], values[:, :8]),
            (values[..., 8:16], values[..., :8]),
            (values[:, 8:16, 8:16], values[:, :8, :8]),
            (values[1:], values[:-1]),
        ]
        for seed in ([0, 0], [1, 0], [0, 1], [1 << 32, 0]):
            shifted.append((values, mask(0.5, 4, 256, 256, torch.tensor(seed)).double() * 2 - 1))
        for a, b in shifted:
            assert (a * b).mean().abs() < 4.5 / math.sqrt(a.numel())

    def test_a_part_of_a_mask_is_the_mask_of_the_part(self) -> None:
        full = mask(0.3, 3, 40, 70)
        rows, keys = torch.arange(17, 30), torch.arange(5, 66)
        part = kept(0.3, SEED, torch.tensor([2]), rows, keys)
        assert torch.equal(part[0], full[2, 17:30, 5:66])


class TestDefinition:
    def tensors(self, *leading: int) -> list[Tensor]:
        return [draw(*leading, 20, 8, seed=seed) for seed in range(3)]

    @pytest.mark.parametrize("impl", ["reference"])
    def test_weights_are_zero_or_scaled(self, impl: str) -> None:
        q, k, v = self.tensors(2, 3)
        weights = torch.softmax(q @ k.mT / math.sqrt(8), -1)
        keep = mask(0.3, 6, 20, 20).view(2, 3, 20, 20)
        rules = ScoreRules(dropout=0.3, dropout_seed=SEED)
        out = attention(q, k, v, rules=rules, impl=impl)
        torch.testing.assert_close(out, weights * keep / 0.7 @ v)

    def test_the_mean_over_seeds_is_attention_without_dropout(self) -> None:
        q, k, v = self.tensors(1, 64)
        q, k, v = (x[:, :1].expand(-1, 64, -1, -1) for x in (q, k, v))
        expected = attention(q, k, v)[:, 0]
        outs = [
            attention(q, k, v, rules=ScoreRules(dropout=0.2, dropout_seed=torch.tensor([seed, 0])))
            for seed in range(16)
        ]
        every = torch.cat(outs, 1)
        error = (every.mean(1) - expected).abs() / (every.std(1) / math.sqrt(every.shape[1]))
        assert error.max() < 4.5

    @pytest.mark.parametrize("impl", OURS)
    def test_heads_are_counted_over_all_leading_dimensions(self, impl: str) -> None:
        shapes = [(), (6,), (2, 3), (1, 2, 3)]
        results = []
        for shape in shapes:
            tensors = [
                x.to(DEVICE, torch.float32).expand(*shape, -1, -1).contiguous()
                for x in self.tensors()
            ]
            torch.manual_seed(0)
            out = attention(*tensors, rules=ScoreRules(dropout=0.4), impl=impl)
            results.append(out.reshape(-1, 20, 8))
        for other in results[2:]:
            torch.testing.assert_close(other, results[1])
        torch.testing.assert_close(results[0][0], results[1][0])


class TestRandomState:
    def attend(self, impl: str, q: Tensor, **rules: Any) -> Tensor:
        return attention(q, q, q, is_causal=True, impl=impl, rules=ScoreRules(dropout=0.4, **rules))

    def test_implementations_draw_the_same_numbers(self) -> None:
        q = draw(1, 2, 40, 16).to(DEVICE, torch.float32)
        results = []
        for impl in OURS:
            torch.manual_seed(5)
            results.append([self.attend(impl, q) for _ in range(2)])
            assert not torch.equal(*results[-1])
        for other in results[1:]:
            torch.testing.assert_close(other, results[0], rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("impl", OURS[1:])
    def test_seed_and_probability_of_the_second_call_are_used(self, impl: str) -> None:
        q = draw(1, 2, 40, 16).to(DEVICE, torch.float32)
        for dropout, seed in ((0.4, [1, 2]), (0.4, [1, 3]), (0.2, [1, 3]), (0.4, [1, 2])):
            rules = ScoreRules(dropout=dropout, dropout_seed=torch.tensor(seed, device=DEVICE))
            expected = attention(q, q, q, rules=rules, impl="reference")
            actual = attention(q, q, q, rules=rules, impl=impl)
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("impl", OURS)
    def test_a_checkpointed_segment_drops_the_same_weights_again(self, impl: str) -> None:
        q = draw(1, 2, 40, 16).to(DEVICE, torch.float32).requires_grad_()

        def gradient(segment: Any) -> Tensor:
            torch.manual_seed(5)
            return torch.autograd.grad(segment().square().sum(), q)[0]

        def segment() -> Tensor:
            return self.attend(impl, q, window=20)

        expected = gradient(segment)
        assert torch.equal(gradient(lambda: checkpoint(segment, use_reentrant=False)), expected)

    def test_the_seed_of_the_forward_is_saved(self) -> None:
        """A change of the tensor before the backward is an error, as for any saved tensor."""
        q = draw(1, 1, 16, 16).to(DEVICE, torch.float32).requires_grad_()
        for impl in OURS[1:]:
            seed = torch.tensor([1, 2], device=DEVICE)
            out = self.attend(impl, q, dropout_seed=seed)
            seed.add_(1)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                out.sum().backward()

    @pytest.mark.parametrize("window", [None, 7])
    def test_sdpa_uses_the_dropout_of_torch(self, window: int | None) -> None:
        q, k, v = (draw(2, 2, 20, 8, seed=seed).float() for seed in range(3))
        near = torch.ones(20, 20, dtype=torch.bool).tril().triu(-6)
        how: dict[str, Any] = {"is_causal": True} if window is None else {"attn_mask": near}
        torch.manual_seed(1)
        expected = functional.scaled_dot_product_attention(q, k, v, dropout_p=0.5, **how)
        torch.manual_seed(1)
        rules = ScoreRules(dropout=0.5, window=window)
        actual = attention(q, k, v, is_causal=True, rules=rules, impl="sdpa")
        torch.testing.assert_close(actual, expected)

    def test_compiled_as_one_graph(self) -> None:
        q = draw(1, 2, 40, 16).to(DEVICE, torch.float32).requires_grad_()
        seed = SEED.to(DEVICE)

        def call(q: Tensor) -> Tensor:
            return self.attend("triton", q, dropout_seed=seed)

        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
        results = []
        for run in (call, compiled):
            out = run(q)
            results.append([out, *torch.autograd.grad(out.square().sum(), q)])
        torch.testing.assert_close(results[1], results[0])


class TestSupport:
    def test_no_dropout_is_no_rule(self) -> None:
        rules = ScoreRules(dropout=0.0, dropout_seed=SEED)
        assert rules.names == ()
        assert not ScoreRules(dropout=0.5, window=3).only_drops
        assert ScoreRules(dropout=0.5, dropout_seed=SEED).only_drops

    def test_which_implementations_have_it(self) -> None:
        x = torch.zeros(1, 2, 16, 16)
        text = str(explain(x, x, x, rules=ScoreRules(dropout=0.5)))
        assert "FlexAttention has no dropout" in text
        assert "auto chooses sdpa" in text
        text = str(explain(x, x, x, rules=ScoreRules(dropout=0.5, dropout_seed=SEED)))
        assert "random numbers of its own" in text
        assert "auto chooses reference" in text

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"dropout": 1.0}, "dropout=1.0 is not a probability below 1"),
            ({"dropout": -0.1}, "dropout=-0.1 is not"),
            ({"dropout": "0.1"}, "dropout='0.1' is not"),
            ({"dropout_seed": SEED}, "dropout_seed needs dropout"),
            ({"dropout": 0.1, "dropout_seed": 5}, "dropout_seed is a int; it must be a tensor"),
            ({"dropout": 0.1, "dropout_seed": SEED.int()}, "dropout_seed is int32"),
            ({"dropout": 0.1, "dropout_seed": SEED[:1]}, r"dropout_seed has shape \(1,\)"),
        ],
    )
    def test_invalid(self, fields: dict[str, Any], message: str) -> None:
        x = torch.zeros(1, 2, 16, 16)
        with pytest.raises(ValueError, match=message):
            attention(x, x, x, rules=ScoreRules(**fields))
