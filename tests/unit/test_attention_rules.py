"""`ScoreRules`: definitions, visible intervals, and every implementation on a CPU in float64."""

from __future__ import annotations

import itertools
import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import flex_attention

from attention_inputs import draw
from attention_rules import (
    ALL,
    BIASES,
    BOUNDS,
    FLEX,
    IN_KERNELS,
    RUNS,
    SEED,
    SINKS,
    SLOPES,
    VISIBLE,
    inputs,
)
from stepscope.attention import ScoreRules, attention, explain, visibility
from stepscope.attention.cost import pair_flops
from stepscope.attention.flex import attend_by_rules
from stepscope.attention.visibility import (
    Lengths,
    key_intervals,
    query_intervals,
    visible_keys,
    visible_pairs,
)

CPU = torch.device("cpu")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def lengths_of(name: str) -> Lengths:
    case = ALL[name]
    causal, align = case.how.get("is_causal", False), case.how.get("causal_align")
    return Lengths(case.seq_q, case.seq_k, causal, align, CPU)


def attended(impl: str, tensors: list[Tensor], grad: Tensor, **how: Any) -> list[Tensor]:
    """Return output and gradients, also of the sinks and the bias."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    rules = how.pop("rules")
    fields = {name: getattr(rules, name) for name in rules.names}
    for name in ("sinks", "bias"):
        if name in fields:
            fields[name] = fields[name].detach().requires_grad_()
            leaves.append(fields[name])
    out = attention(*leaves[:3], impl=impl, rules=ScoreRules(**fields), **how)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


class TestVisibility:
    def seen(self, document: list[int], how: dict[str, Any], **rules: Any) -> list[str]:
        """Return a row of 0 and 1 for each query."""
        fields = {"documents": torch.tensor(document)} | rules
        length = len(document)
        lengths = Lengths(length, length, how.get("is_causal", False), None, CPU)
        mask = visible_keys(ScoreRules(**fields), lengths)
        return ["".join(str(int(x)) for x in row) for row in mask[0]]

    def test_documents(self) -> None:
        assert self.seen([4, 4, 7, 7, 4], {"is_causal": True}) == [
            "10000", "11000", "00100", "00110", "00001",
        ]  # fmt: skip
        assert self.seen([1, 1, 2, 2, 2], {}) == ["11000", "11000", "00111", "00111", "00111"]

    def test_a_window_includes_the_query_itself(self) -> None:
        assert self.seen([0] * 5, {"is_causal": True}, window=2) == [
            "10000", "11000", "01100", "00110", "00011",
        ]  # fmt: skip
        assert self.seen([0] * 4, {}, window=2) == ["1100", "1110", "0111", "0011"]

    def test_a_prefix_of_each_document(self) -> None:
        assert self.seen([1, 1, 1, 2, 2, 2], {"is_causal": True}, prefix=2) == [
            "110000", "110000", "111000", "000110", "000110", "000111",
        ]  # fmt: skip

    def test_documents_with_more_keys_than_queries(self) -> None:
        rules = ScoreRules(cu_seqlens=(torch.tensor([0, 1, 3]), torch.tensor([0, 3, 5])))
        expected = {"bottom-right": ["11100", "00010", "00011"],
                    "top-left": ["10000", "00010", "00011"]}  # fmt: skip
        for align, rows in expected.items():
            mask = visible_keys(rules, Lengths(3, 5, True, align, CPU))[0]
            assert ["".join(str(int(x)) for x in row) for row in mask] == rows

    @pytest.mark.parametrize("name", VISIBLE)
    def test_intervals_are_the_definition(self, name: str) -> None:
        rules, lengths = VISIBLE[name].on("cpu"), lengths_of(name)
        mask = visible_keys(rules, lengths)
        low, high = key_intervals(rules, lengths).unbind(1)
        keys = torch.arange(lengths.seq_k)
        assert torch.equal((keys >= low[..., None]) & (keys < high[..., None]), mask)
        first, last = query_intervals(rules, lengths).unbind(1)
        rows = torch.arange(lengths.seq_q)
        seen_by = (rows >= first[..., None]) & (rows < last[..., None])
        assert torch.equal(seen_by.transpose(1, 2), mask)
        for ends in (low, high, first, last):
            assert (ends.diff(dim=-1) >= 0).all()

    @pytest.mark.parametrize("name", VISIBLE)
    def test_pairs_of_the_flop_count(self, name: str) -> None:
        case = VISIBLE[name]
        q, k, _, _ = inputs(case)
        rules = case.on("cpu")
        mask = visible_keys(rules, lengths_of(name)).expand(q.shape[0], -1, -1)
        pairs = visible_pairs(rules, q, k, **case.how)
        assert pairs == mask.sum()
        assert pair_flops(pairs, heads=2, d_head=16) == 4 * 16 * 2 * int(mask.sum())

    def test_an_in_place_change_of_the_documents_is_seen(self) -> None:
        documents = RUNS.clone()
        rules, lengths = ScoreRules(documents=documents), Lengths(70, 70, True, None, CPU)
        first = key_intervals(rules, lengths)
        assert key_intervals(rules, lengths) is first
        documents.copy_(torch.arange(70) // 9)
        expected = visible_keys(rules, lengths).sum(-1)
        low, high = key_intervals(rules, lengths).unbind(1)
        assert torch.equal(high - low, expected.int())

    def test_intervals_created_in_inference_mode_are_usable_in_training(self) -> None:
        lengths = Lengths(61, 61, True, None, CPU)
        for rules in (ScoreRules(window=13), ScoreRules(documents=torch.arange(61) // 8)):
            with torch.inference_mode():
                created = key_intervals(rules, lengths)
            assert not created.is_inference()
            assert key_intervals(rules, lengths) is created

    def test_a_capture_uses_and_keeps_what_follows_from_numbers(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        capturing = False
        monkeypatch.setattr(visibility, "is_capturing", lambda: capturing)
        for name in ("_BY_NUMBERS", "_IN_GRAPHS"):
            monkeypatch.setattr(visibility, name, {})
        lengths = Lengths(41, 41, True, None, CPU)
        window, documents = ScoreRules(window=6), ScoreRules(documents=torch.arange(41) // 9)
        earlier = [key_intervals(rules, lengths) for rules in (window, documents)]
        capturing = True
        assert key_intervals(ScoreRules(window=6), lengths) is earlier[0]
        # Documents may change between replays; others were not derived before.
        assert key_intervals(documents, lengths) is not earlier[1]
        key_intervals(ScoreRules(window=7), lengths)
        assert [entry[1] for entry in visibility._IN_GRAPHS.values()] == [earlier[0]]
        assert len(visibility._BY_NUMBERS) == 1

    def test_rules_that_share_their_visible_keys_share_the_intervals(self) -> None:
        rules, lengths = ScoreRules(documents=RUNS, window=9), Lengths(70, 70, True, None, CPU)
        changed = rules.with_scores(softcap=3.0, sinks=SINKS)
        assert changed.names == ("window", "documents", "softcap", "sinks")
        assert key_intervals(changed, lengths) is key_intervals(rules, lengths)

    def test_intervals_of_a_mode_or_a_transform_are_not_kept(self) -> None:
        rules = ScoreRules(window=5)
        expected = attention(*(draw(1, 2, 37, 8),) * 3, rules=rules, impl="reference")
        x = draw(1, 2, 37, 8)
        with FakeTensorMode(allow_non_fake_inputs=True):
            attention(x, x, x, rules=rules, impl="sdpa")
        torch.testing.assert_close(attention(x, x, x, rules=rules, impl="sdpa"), expected)
        x = draw(1, 2, 39, 8)
        torch.func.grad(lambda q: attention(q, x, x, rules=rules, impl="sdpa").sum())(x)


class TestDefinitions:
    """The naive form against formulas of single scores."""

    def scores(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        q, k, v = (draw(1, 2, 6, 4, seed=seed) for seed in range(3))
        return q, k, v, q @ k.mT / 2

    def reference(self, q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
        return attention(q, k, v, impl="reference", **how)

    def test_a_soft_cap_bounds_scores(self) -> None:
        q, k, v, scores = self.scores()
        expected = torch.softmax(3.0 * torch.tanh(scores / 3.0), -1) @ v
        torch.testing.assert_close(self.reference(q, k, v, rules=ScoreRules(softcap=3.0)), expected)

    def test_alibi_is_a_penalty_in_proportion_to_the_distance(self) -> None:
        q, k, v, scores = self.scores()
        slopes = torch.tensor([0.5, 2.0])
        for head, row, key in torch.cartesian_prod(*map(torch.arange, (2, 6, 6))):
            scores[0, head, row, key] -= slopes[head] * abs(row - key)
        actual = self.reference(q, k, v, rules=ScoreRules(alibi_slopes=slopes))
        torch.testing.assert_close(actual, torch.softmax(scores, -1) @ v)

    def test_a_sink_takes_probability_and_adds_no_value(self) -> None:
        q, k, v, scores = self.scores()
        sinks = torch.tensor([0.5, -1.0], dtype=torch.float64)
        weights = scores.exp() / (scores.exp().sum(-1, keepdim=True) + sinks.exp()[:, None, None])
        actual = self.reference(q, k, v, rules=ScoreRules(sinks=sinks))
        torch.testing.assert_close(actual, weights @ v)

    def test_a_bias_is_added_after_the_soft_cap(self) -> None:
        q, k, v, scores = self.scores()
        bias = draw(6, 6, seed=5)
        expected = torch.softmax(torch.tanh(scores) + bias, -1) @ v
        rules = ScoreRules(bias=bias, softcap=1.0)
        torch.testing.assert_close(self.reference(q, k, v, rules=rules), expected)

    def test_packed_documents_are_separate_calls(self) -> None:
        q, k, v = (draw(1, 2, 70, 8, seed=seed) for seed in range(3))
        parts = [
            self.reference(q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], is_causal=True)
            for a, b in itertools.pairwise(BOUNDS)
        ]
        packed = self.reference(q, k, v, is_causal=True, rules=ScoreRules(cu_seqlens=BOUNDS))
        torch.testing.assert_close(packed, torch.cat(parts, 2))

    def test_rows_without_a_visible_key_are_zero(self) -> None:
        q, k, v = draw(1, 1, 9, 4), draw(1, 1, 3, 4, seed=1), draw(1, 1, 3, 4, seed=2)
        q.requires_grad_()
        how: dict[str, Any] = {"is_causal": True, "causal_align": "bottom-right"}
        for impl in ("reference", "sdpa"):
            out = attention(q, k, v, rules=ScoreRules(window=2), impl=impl, **how)
            assert not out[..., :6, :].any()
            (grad,) = torch.autograd.grad(out.sum(), q)
            assert grad.isfinite().all()
            assert not grad[..., :6, :].any()


class TestImplementations:
    @pytest.mark.parametrize("name", ALL)
    @pytest.mark.parametrize("impl", ["tiled", "sdpa", "sdpa_math", "auto"])
    def test_output_and_gradients(self, impl: str, name: str) -> None:
        case = ALL[name]
        *tensors, grad = inputs(case)
        rules = case.on("cpu", torch.float64)
        how = case.how | {"rules": rules}
        if impl != "auto" and (reason := self.refusal(impl, tensors, how)):
            with pytest.raises(ValueError, match=re.escape(reason)):
                attention(*tensors, impl=impl, **how)
            return
        expected = attended("reference", tensors, grad, **how)
        # The second call uses the dispatch cache and the cached intervals.
        for _ in range(2):
            for ours, theirs in zip(attended(impl, tensors, grad, **how), expected, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)

    def refusal(self, impl: str, tensors: list[Tensor], how: dict[str, Any]) -> str | None:
        verdicts = {verdict.name: verdict for verdict in explain(*tensors, **how).verdicts}
        return verdicts[impl].refusal

    @pytest.mark.parametrize("name", ["window", "documents of each batch", "all"])
    def test_the_derivative_of_the_definition(self, name: str) -> None:
        case = IN_KERNELS[name]
        q, k, v, _ = inputs(case._replace(), d=2)
        rules = case.on("cpu", torch.float64)
        tensors = [x[..., :2].requires_grad_() for x in (q, k, v)]

        def reference(*leaves: Tensor) -> Tensor:
            return attention(*leaves, impl="reference", rules=rules, **case.how)

        assert torch.autograd.gradcheck(reference, tensors, fast_mode=True)

    @pytest.mark.parametrize("name", FLEX)
    def test_flex_attention_gets_equivalent_functions(self, name: str) -> None:
        """Not compiled, which a CPU can run: the functions are the same."""
        case = ALL[name]
        q, k, v, _ = inputs(case, dtype=torch.float32)
        rules, lengths = case.on("cpu", torch.float32), lengths_of(name)
        ours = attend_by_rules(flex_attention, q, k, v, None, lengths, rules)
        expected = attention(q, k, v, impl="reference", rules=rules, **case.how)
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)

    def test_explain_says_which_rule_is_not_supported(self) -> None:
        x = torch.zeros(1, 2, 8, 16)
        text = str(explain(x, x, x, is_causal=True, rules=ScoreRules(softcap=3.0, sinks=SINKS)))
        assert "auto chooses reference" in text
        assert "torch's SDPA has no soft-capping" in text
        text = str(explain(x, x, x, rules=ScoreRules(bias=torch.zeros(8, 8))))
        assert "auto chooses sdpa" in text
        assert text.count("no additive bias") == 1
        text = str(explain(x, x, x, rules=ScoreRules(sinks=SINKS)))
        assert "torch's SDPA has no attention sinks" in text

    def test_rules_that_differ_are_dispatched_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        cache: dict[Any, Any] = {}
        monkeypatch.setattr("stepscope.attention.api._DISPATCH_CACHE", cache)
        x = torch.zeros(2, 2, 70, 8)
        variants: list[dict[str, Any]] = [
            {"window": 3}, {"window": 4}, {"softcap": 3.0}, {"softcap": 4.0}, {"prefix": 3},
            {"prefix": torch.tensor([3, 3])}, {"documents": RUNS},
            {"documents": torch.stack((RUNS, RUNS))}, {"documents": RUNS.int()},
            {"cu_seqlens": BOUNDS}, {"cu_seqlens": (BOUNDS, BOUNDS)}, {"alibi_slopes": SLOPES},
            {"sinks": SINKS}, {"sinks": SINKS.double()},
            {"sinks": SINKS.clone().requires_grad_()}, {"bias": torch.zeros(70, 70)},
            {"bias": torch.zeros(1, 70)}, {"dropout": 0.1}, {"dropout": 0.2},
            {"dropout": 0.1, "dropout_seed": SEED},
        ]  # fmt: skip
        attention(x, x, x, is_causal=True)
        for number, fields in enumerate(variants, start=2):
            for _ in range(2):
                attention(x, x, x, is_causal=True, rules=ScoreRules(**fields))
            assert len(cache) == number, fields

    def test_tensors_of_rules_are_saved_for_backward(self) -> None:
        """So that saved-tensor hooks see them, and autograd sees a change before the backward."""
        q, k, v, grad = inputs(ALL["all"], dtype=torch.float32, device=DEVICE)
        rules = ALL["all"].on(DEVICE)
        saved: list[int] = []
        q.requires_grad_()

        def pack(x: Tensor) -> Tensor:
            saved.append(x.data_ptr())
            return x.mT.contiguous().mT if x.dim() > 1 else x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            out = attention(q, k, v, is_causal=True, rules=rules, impl="triton")
        lengths = Lengths.of(q, k, True, None)
        kept = (rules.sinks, rules.alibi_slopes, key_intervals(rules, lengths))
        assert {x.data_ptr() for x in kept if x is not None} <= set(saved)
        (ours,) = torch.autograd.grad(out, q, grad)
        out = attention(q, k, v, is_causal=True, rules=rules, impl="triton")
        torch.testing.assert_close(ours, torch.autograd.grad(out, q, grad, retain_graph=True)[0])
        assert rules.sinks is not None
        rules.sinks.add_(1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(out, q, grad)

    def test_tensors_of_the_second_call_are_used(self) -> None:
        """The cached choice is that of the first call, the rules are those of the second."""
        x = draw(1, 4, 70, 8)
        for documents in (RUNS, torch.arange(70) // 10, RUNS):
            rules = ScoreRules(documents=documents)
            expected = attention(x, x, x, rules=rules, impl="reference")
            actual = attention(x, x, x, rules=rules, impl="sdpa")
            torch.testing.assert_close(actual, expected)


class TestErrors:
    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"window": 0}, "window=0 is not a positive integer"),
            ({"window": 2.5}, "window=2.5"),
            ({"softcap": -1.0}, "softcap=-1.0 is not a positive number"),
            ({"softcap": math.inf}, "softcap=inf"),
            ({"prefix": -1}, "prefix=-1 is neither a number of keys nor a tensor"),
            ({"prefix": 2.5}, "prefix=2.5"),
            ({"cu_seqlens": [0, 8]}, "cu_seqlens is a list; it must be a tensor"),
            ({"cu_seqlens": (0, 4, 8)}, "cu_seqlens is a tuple"),
            ({"cu_seqlens": ([0, 8], BOUNDS)}, "cu_seqlens is a tuple"),
            ({"sinks": 1.0}, "sinks is a float"),
            ({"window": 3, "prefix": 2}, "window and a prefix"),
            ({"documents": RUNS, "cu_seqlens": BOUNDS}, "give one of them"),
            ({"cu_seqlens": (BOUNDS, BOUNDS + 0), "alibi_slopes": SLOPES}, "same documents"),
        ],
        ids=str,
    )
    def test_invalid_rules(self, fields: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            ScoreRules(**fields)

    @pytest.mark.parametrize(
        ("fields", "how", "message"),
        [
            ({"prefix": 2}, {}, "prefix needs is_causal=True"),
            ({"documents": RUNS[:5]}, {}, r"documents has shape \(5,\); it needs \(8,\) or"),
            ({"documents": RUNS[:8].float()}, {}, "documents is float32"),
            ({"cu_seqlens": torch.tensor([[0, 8]])}, {}, r"needs \(documents \+ 1,\)"),
            ({"alibi_slopes": SLOPES[:1]}, {}, r"alibi_slopes has shape \(1,\); it needs \(2,\)"),
            ({"alibi_slopes": SLOPES.clone().requires_grad_()}, {}, "requires a gradient"),
            ({"sinks": torch.tensor([1, 2])}, {}, "sinks is int64"),
            ({"sinks": SINKS.to("meta")}, {}, "sinks is on meta and q is on cpu"),
            ({"prefix": torch.tensor([1, 2])}, {"is_causal": True}, r"prefix has shape \(2,\)"),
            ({"bias": torch.zeros(7, 8)}, {}, "cannot be broadcast"),
        ],
        ids=str,
    )
    def test_rules_that_do_not_fit(
        self, fields: dict[str, Any], how: dict[str, Any], message: str
    ) -> None:
        x = torch.zeros(1, 2, 8, 16)
        for call in (attention, explain):
            with pytest.raises(ValueError, match=message):
                call(x, x, x, rules=ScoreRules(**fields), **how)

    def test_unequal_lengths(self) -> None:
        q, k = torch.zeros(1, 4, 8, 16), torch.zeros(1, 4, 12, 16)
        with pytest.raises(ValueError, match="ambiguous"):
            attention(q, k, k, rules=ScoreRules(window=3))
        with pytest.raises(ValueError, match="as many queries as keys"):
            attention(q, k, k, rules=ScoreRules(documents=RUNS[:8]))
        with pytest.raises(ValueError, match="one tensor for queries and one for keys"):
            attention(q, k, k, rules=ScoreRules(cu_seqlens=torch.tensor([0, 8])))
        pair = (torch.tensor([0, 8]), torch.tensor([0, 12]))
        x = torch.zeros(1, 4, 12, 16)
        # The same tensor twice needs no alignment, and must not be taken for the same rules.
        attention(x, x, x, is_causal=True, rules=ScoreRules(cu_seqlens=pair[1:] * 2))
        with pytest.raises(ValueError, match="need causal_align"):
            attention(x, x, x, is_causal=True, rules=ScoreRules(cu_seqlens=pair))

    def test_tensors_need_four_dimensions(self) -> None:
        x = torch.zeros(4, 8, 16)
        attention(x, x, x, rules=ScoreRules(window=3))
        with pytest.raises(ValueError, match=r"need inputs of \(batch, heads, seq, d\)"):
            attention(x, x, x, rules=ScoreRules(documents=RUNS[:8]))

    def test_transforms_are_refused(self) -> None:
        x = torch.randn(1, 2, 8, 16, device=DEVICE)

        def total(q: Tensor, impl: str) -> Tensor:
            return attention(q, x, x, rules=ScoreRules(window=3), impl=impl).sum()

        total(x, "triton")  # the cached choice is not that of a transform
        with pytest.raises(ValueError, match=r"torch\.func transforms are not supported"):
            torch.func.grad(total)(x, "triton")

    def test_a_transform_does_not_change_the_cached_choice(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        cache: dict[Any, Any] = {}
        monkeypatch.setattr("stepscope.attention.api._DISPATCH_CACHE", cache)
        x = torch.randn(1, 2, 8, 16)
        rules = ScoreRules(window=3)
        for impl in ("auto", "reference"):
            gradient = torch.func.grad(
                lambda q, impl=impl: attention(q, x, x, rules=rules, impl=impl).sum()
            )(x)
            q = x.clone().requires_grad_()
            (expected,) = torch.autograd.grad(attention(q, x, x, rules=rules).sum(), q)
            torch.testing.assert_close(gradient, expected)
        assert len(cache) == 1  # the calls without a transform


def test_a_bias_alone_is_left_to_torch() -> None:
    case = BIASES["bias"]
    q, k, v, _ = inputs(case, dtype=torch.float32)
    rules = case.on("cpu", torch.float32)
    assert explain(q, k, v, rules=rules, **case.how).chosen == "sdpa"
