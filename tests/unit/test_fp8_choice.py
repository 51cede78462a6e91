"""The rule that decides by shape whether a linear layer gains from FP8, and its benchmark."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from stepscope.kernels.fp8.choice import Rates, estimate, not_worth_it
from stepscope.kernels.fp8.recipe import BF16, BLOCKWISE, DELAYED, ROWWISE, Recipe

LARGE = {"2.7b": (8192, 2560, 7680), "2.7b down": (8192, 10_240, 2560), "8b": (32_768, 4096, 4096)}


@pytest.mark.parametrize("shape", LARGE.values(), ids=LARGE)
@pytest.mark.parametrize("scaling", ["tensorwise", DELAYED, ROWWISE, BLOCKWISE])
def test_layers_of_large_models_gain(shape: tuple[int, int, int], scaling: str) -> None:
    assert not_worth_it(*shape, Recipe(scaling)) is None
    times = estimate(*shape, Recipe(scaling))
    # At most the ratio of the rates, less the casts.
    assert 1.1 < times.gain < 1_230 / 650


def test_small_layers_stay_and_the_reason_has_the_numbers() -> None:
    reason = not_worth_it(2048, 768, 768, Recipe())
    assert reason is not None
    assert "2048×768×768" in reason
    assert "11 µs in bf16" in reason


def test_fewer_passes_cost_less_and_more_tokens_amortize_the_weight() -> None:
    shape = LARGE["2.7b"]
    times = {scaling: estimate(*shape, Recipe(scaling)) for scaling in ("tensorwise", DELAYED)}
    assert times[DELAYED].casts_s < times["tensorwise"].casts_s
    gains = [estimate(tokens, 2560, 7680, Recipe()).gain for tokens in (512, 2048, 8192)]
    assert gains == sorted(gains)
    in_bf16 = estimate(*shape, Recipe(weight_gradient=BF16))
    assert in_bf16.fp8_s > times["tensorwise"].fp8_s
    assert in_bf16.casts_s < times["tensorwise"].casts_s


def test_rates_of_another_device_change_the_choice() -> None:
    slow_memory = Rates(bandwidth=2e11)
    assert not_worth_it(*LARGE["2.7b"], Recipe(), slow_memory) is not None


def test_the_benchmark_of_steps_says_why_a_form_is_skipped(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import fp8_step

    out = tmp_path / "lines.jsonl"
    forms = ["fp8-tensorwise", "fp8-rowwise"]
    words = ["--tiny", "--rows", "own_xl", "--seconds", "0.01", "--device", "cpu"]
    fp8_step.main([*words, "--out", str(out), "--forms", *forms])
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["form"] for line in lines] == forms
    assert all("NVIDIA" in line["skipped"] for line in lines)
    assert "NVIDIA" in capsys.readouterr().out
    sys.modules.pop("acceleration", None)
