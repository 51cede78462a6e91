"""Measurements of the flash study: real on a CPU, with fake launches of our kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sample_records import value_of
from stepscope.measure.device import pick_device
from stepscope.studies.attention.workload import RESULTS, AttentionStep, score_rules
from stepscope.studies.base import CaseSkipped, Measurement
from stepscope.studies.flash import STUDY
from stepscope.studies.flash.accuracy import errors
from stepscope.studies.flash.cases import FlashFlags, Shape


class Bench:
    device = pick_device("cpu")

    def __init__(self) -> None:
        self.messages: list[str] = []

    def progress(self, done: int, total: int, what: str) -> None:
        assert done <= total
        self.messages.append(what)


def measured(**flags: Any) -> Measurement:
    (case,) = STUDY.cases(FlashFlags(min_seconds=0.0, race_seconds=0.0, rounds=3, **flags))
    return STUDY.measure(case, Bench())


def grid(attention: str, **flags: Any) -> Measurement:
    flags = {"dtype": ("float32",), "context": (64,), "head_dim": (16,), "shape": ()} | flags
    return measured(part=("grid",), attention=(attention,), **flags)


def test_a_cell_has_three_passes_with_their_flops() -> None:
    result = grid("sdpa")
    assert [(s.name, s.clock, len(s.values)) for s in result.series] == [
        ("both", "host", 5),
        ("forward", "host", 5),
        ("backward", "host", 5),
    ]
    assert all(len(series.warmup) == 2 for series in result.series)
    forward = 4 * 64 * 64 * 16 / 2
    passes = ("forward", "backward", "")
    counted = [value_of(result.quantities, "flops", phase=phase) for phase in passes]
    assert counted == [forward, 2.5 * forward, 3.5 * forward]
    # On a CPU there is no tensor count and no kernel name.
    assert "peak_bytes" not in {one.name for one in result.quantities}
    assert result.notes == {}
    assert result.attachments == {"kernels": {}}


def test_errors_are_relative_to_float64() -> None:
    step = AttentionStep(Shape.parse("1x2x40x16:float32").workload("sdpa"), Bench.device)
    quantities = errors(step, Bench.device)
    inputs = [x.detach().double().requires_grad_() for x in (step.q, step.k, step.v)]
    exact = torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=True)
    gradients = torch.autograd.grad(exact, inputs, step.grad.double())
    got = step.results()
    for name, wanted in zip(RESULTS, (exact, *gradients), strict=True):
        distance = (got[name].double() - wanted).abs().max().item()
        error = value_of(quantities, "error", variant=name)
        assert error == pytest.approx(distance, rel=1e-6, abs=1e-12)
        assert 0 < value_of(quantities, "last_place", variant=name) <= 1e-6
        assert 0 < value_of(quantities, "reference_error", variant=name) < 1e-4


def test_a_wrong_result_has_a_large_error(monkeypatch: pytest.MonkeyPatch) -> None:
    step = AttentionStep(Shape.parse("1x1x40x16:float32").workload("sdpa"), Bench.device)
    wrong = step.results()
    wrong["dk"] = wrong["dk"] + 0.5
    monkeypatch.setattr(step, "results", lambda: wrong)
    quantities = errors(step, Bench.device)
    assert value_of(quantities, "error", variant="dk") == pytest.approx(0.5, rel=1e-3)
    assert value_of(quantities, "error", variant="dq") < 1e-4
    wrong["dk"][0, 0, 0, 0] = torch.nan
    names = {(one.name, one.variant) for one in errors(step, Bench.device)}
    assert ("error", "dk") not in names
    assert ("error", "dq") in names


def test_the_error_of_the_reference_is_the_reference_error() -> None:
    quantities = grid("reference").quantities
    for name in RESULTS:
        reference = value_of(quantities, "reference_error", variant=name)
        assert value_of(quantities, "error", variant=name) == reference


def test_errors_are_left_out_where_float64_costs_too_much() -> None:
    step = AttentionStep(Shape.parse("1x1x4097x1:float32").workload("sdpa"), Bench.device)
    assert errors(step, Bench.device) == ()


@pytest.fixture
def no_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable Triton's interpreter."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr("stepscope.attention.api._DISPATCH_CACHE", {})


@pytest.mark.usefixtures("no_interpreter")
@pytest.mark.parametrize("name", ["triton", "sdpa_cudnn", "flex"])
def test_an_unsupported_implementation_is_skipped_with_its_reason(name: str) -> None:
    with pytest.raises(CaseSkipped, match=f"{name}: .*cpu"):
        grid(name, dtype=("bfloat16",), head_dim=(64,))


def test_long_sequences_are_skipped_on_a_cpu() -> None:
    with pytest.raises(CaseSkipped, match="GFLOP per call"):
        grid("sdpa", context=(65536,))


@pytest.mark.usefixtures("no_interpreter")
def test_a_race_excludes_unsupported_implementations() -> None:
    result = measured(
        part=("race",), race=("1x1x64x16:float32",), racers=("triton", "sdpa", "tiled", "auto")
    )
    assert [(series.name, series.variant) for series in result.series] == [
        (name, racer) for name in ("step", "wall") for racer in ("sdpa", "tiled", "auto")
    ]
    assert all(len(series.values) == 3 for series in result.series)
    assert result.attachments["excluded"]["triton"].startswith("refused: q is on cpu")
    assert result.notes == {"auto": "takes sdpa"}


@pytest.mark.parametrize(
    ("option", "pairs"),
    [
        ("window=8", 64 * 8 - 28),
        ("prefix=10", 64 * 65 // 2 + 45),
        ("full:keys=1", None),
        ("softcap=5", None),
        ("dropout=0.25", None),
    ],
)
def test_a_race_with_a_rule_counts_visible_pairs(option: str, pairs: int | None) -> None:
    result = measured(
        part=("race",), race=(f"1x2x64x16:float32:{option}",), racers=("reference", "auto")
    )
    assert {series.variant for series in result.series} == {"reference", "auto"}
    # A causal mask counts as half of the scores, a rule that hides keys as what it leaves.
    counted = pairs if pairs is not None else 64 * 64 // (1 if "full" in option else 2)
    assert value_of(result.quantities, "flops") == 3.5 * 4 * counted * 2 * 16


def test_packed_documents_of_a_race_fill_the_sequence() -> None:
    rules = score_rules("documents=16", 2, 100, torch.device("cpu"))
    bounds = rules.cu_seqlens
    assert isinstance(bounds, torch.Tensor)
    assert (bounds[0], bounds[-1], len(bounds)) == (0, 100, 7)
    assert (bounds.diff() > 0).all()


def test_a_race_excludes_failing_implementations(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = AttentionStep.results

    def results(self: AttentionStep) -> dict[str, torch.Tensor]:
        if self.workload.attention == "tiled":
            raise RuntimeError("planted\nmore")
        return honest(self)

    monkeypatch.setattr(AttentionStep, "results", results)
    result = measured(part=("race",), race=("1x2x64x16:float32",), racers=("sdpa", "tiled"))
    assert result.attachments["excluded"] == {"tiled": "failed: RuntimeError: planted"}
    assert [(s.name, s.variant) for s in result.series] == [("step", "sdpa"), ("wall", "sdpa")]
    with pytest.raises(RuntimeError, match="tiled: failed: RuntimeError: planted"):
        measured(part=("race",), race=("1x2x64x16:float32",), racers=("flex", "tiled"))


def test_a_race_without_implementations_is_skipped_with_all_reasons() -> None:
    with pytest.raises(CaseSkipped, match=r"triton: refused.*; flex: refused"):
        measured(part=("race",), race=("1x1x64x16",), racers=("triton", "flex"))


def test_implementations_of_a_race_share_their_tensors() -> None:
    step = AttentionStep(Shape.parse("1x1x16x8:float32").workload("sdpa"), Bench.device)
    other = step.variant(attention="tiled")
    assert (other.q is step.q, other.grad is step.grad) == (True, True)
    for name, value in step.results().items():
        torch.testing.assert_close(other.results()[name], value)
