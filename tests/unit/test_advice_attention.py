"""Naive attention: its scores among the saved tensors, and what wrote it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
import torch
from test_advice_rules import facts

from own_records import attached, inspected_record, measured_on_cpu
from stepscope.advisor.advise.attention_facts import is_called, score_bytes
from stepscope.advisor.advise.cases import OF_SCRIPTS
from stepscope.advisor.advise.facts import facts_of
from stepscope.analysis.advice.changes import advise
from stepscope.analysis.advice.facts import Facts, PhaseWork
from stepscope.analysis.trace.summary import Summary
from stepscope.records.memory import PhasePeak, SavedTensor, saved_line
from stepscope.studies.own import STUDY as OWN
from stepscope.studies.own.cases import OwnFlags
from stepscope.views.memory import Account

MIB = 1 << 20


def saved(operator: str, *shape: int, module: str = "Net/0.attend", times: int = 1) -> SavedTensor:
    return SavedTensor(
        module=module,
        operator=operator,
        shape=shape,
        dtype="float32",
        bytes=MIB,
        code="net.py:1",
        times=times,
    )


def account(tensors: Sequence[SavedTensor], micro_batches: int = 1) -> Account:
    """Ledger of a step in which one micro-batch's saved tensors are live at the peak."""
    lines: dict[str, int] = {"parameters": 7 * MIB}
    for one in tensors:
        line = saved_line(one.module, one.operator)
        lines[line] = lines.get(line, 0) + one.bytes * one.times // micro_batches
    peak = PhasePeak(phase="forward", allocated=sum(lines.values()), lines=lines, operator="mm")
    return Account(attached(inspected_record(), ledger=[peak], saved=list(tensors)))


def summary() -> Summary:
    return inspected_record().required("profile", Summary)


def test_only_tensors_next_to_a_softmax_are_scores() -> None:
    scores = (
        saved("softmax", 8, 4, 64, 64),
        saved("dropout", 8, 4, 64, 64, module="Net/0.attend.drop"),
        saved("matmul", 32, 64, 64),
        saved("matmul", 32, 64, 16),
    )
    others = (
        saved("layer_norm", 8, 64, 64, module="Net/0.norm"),
        saved("gelu", 8, 64, 64),
        saved("conv2d", 8, 3, 224, 224, module="Net/stem"),
        saved("log_softmax", 8, 64, 64, module="loss"),
    )
    assert score_bytes(account((*scores, *others))) == 3 * MIB
    assert score_bytes(account(others)) == 0


def test_one_head_as_wide_as_the_context_is_distinguished_from_other_activations() -> None:
    one_head = (
        saved("softmax", 8, 64, 64),
        saved("matmul", 8, 64, 64),
        saved("layer_norm", 8, 64, 64, module="Net/0.norm"),
    )
    assert score_bytes(account(one_head)) == MIB


@pytest.mark.parametrize("part", ["Net/0.attend.", "attend.", "Net/", ""])
def test_scores_are_found_around_a_softmax_module(part: str) -> None:
    tensors = (
        saved("softmax", 8, 4, 64, 64, module=f"{part}softmax"),
        saved("dropout", 8, 4, 64, 64, module=f"{part}drop"),
    )
    other = saved("dropout", 8, 4, 64, 64, module="Other/0.drop")
    assert score_bytes(account(tensors)) == 2 * MIB
    assert score_bytes(account((*tensors, other))) == (2 if part else 3) * MIB


def test_scores_of_one_micro_batch_are_live_at_a_time() -> None:
    together = (saved("softmax", 8, 4, 64, 64, times=4),)
    each = (saved("softmax", 8, 4, 64, 64),) * 4
    assert score_bytes(account(together, 4)) == score_bytes(account(each, 4)) == MIB


@pytest.mark.parametrize(("width", "expected"), [(16, 2 * MIB), (64, 0)])
def test_scores_that_pytorchs_attention_saves(width: int, expected: int) -> None:
    """If heads are as wide as the context, scores cannot be distinguished from values."""
    operator = "multi_head_attention_forward"
    ledger = account(
        (saved(operator, 8, 4, 64, 64), saved(operator, 32, 64, 64), saved(operator, 32, 64, width))
    )
    assert score_bytes(ledger) == expected
    assert is_called(summary(), ledger) is bool(expected)


def test_a_models_naive_attention_is_not_pytorchs() -> None:
    assert not is_called(summary(), account((saved("softmax", 8, 4, 64, 64),)))
    assert not is_called(summary(), None)


class Encoder(torch.nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layer = torch.nn.TransformerEncoderLayer(32, 2, 64, dropout=dropout, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).square().mean()


def _batch(size: int, device: torch.device) -> torch.Tensor:
    return torch.ones(size, 24, 32, device=device)


def with_dropout() -> tuple[torch.nn.Module, object]:
    return Encoder(0.1), _batch


def without_dropout() -> tuple[torch.nn.Module, object]:
    return Encoder(0.0), _batch


def measured_step(module: str, build: str) -> Facts:
    flags = OwnFlags(model=f"{module}:{build}", batch=(2,), warmup=1, steps=2, traced=1)
    (case,) = OWN.cases(flags)
    return facts_of(measured_on_cpu(OWN, case))


def test_dropout_prevents_pytorchs_fused_attention_on_a_cpu() -> None:
    naive = measured_step(__name__, "with_dropout")
    assert naive.attention
    assert naive.attention_called
    # Scores, their dropout mask, and the result: 2 samples, 2 heads, 24 positions.
    assert naive.score_bytes == 3 * 2 * 2 * 24 * 24 * 4
    fused = measured_step(__name__, "without_dropout")
    assert fused.attention == ()
    assert fused.score_bytes == 0


@pytest.mark.parametrize("on_gpu", [True, False])
def test_pytorchs_attention_should_use_its_fused_kernels(on_gpu: bool) -> None:
    naive = PhaseWork(name="forward", classes={"matmul": 10.0, "softmax": 20.0})
    step = facts(
        {"matmul": 30.0, "softmax": 20.0},
        {"matmul": 50.0},
        attention=(naive,),
        attention_called=True,
        on_gpu=on_gpu,
    )
    (change,) = advise(step)
    assert change.code == "attention-fast-path"
    assert "PyTorch's attention is called, but falls back to its naive implementation" in change.why
    assert not set(change.setting) & OF_SCRIPTS
    assert "only you know" in change.by_author
    text = " ".join((change.why, change.risk, *change.lines))
    assert "scaled_dot_product_attention(q, k, v" not in text
    assert ("dropout regularises" in text) is ("dropout = 0.0" in text) is (not on_gpu)
    (own,) = advise(msgspec.structs.replace(step, attention_called=False))
    assert own.why.startswith("attention is naive")
