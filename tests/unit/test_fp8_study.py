"""The FP8 study: measured here on a tiny model, and its findings from planted records."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from fp8_on_cpu import pretend_fp8
from fp8_records import probe, tensors_record, training_record
from quiet_bench import QuietBench
from stepscope.errors import UsageError
from stepscope.kernels.fp8 import recipe as recipes
from stepscope.kernels.fp8.recipe import Recipe
from stepscope.records.schema import Record
from stepscope.report.blocks import Finding
from stepscope.studies.base import CaseSkipped, Measurement
from stepscope.studies.fp8.cases import Fp8Flags, LayerProbe, TensorsCase
from stepscope.studies.fp8.layers import (
    Observer,
    cast_losses,
    emulate_bf16,
    emulate_fp8,
    gemm_losses,
    linears_of,
    use_fp8,
)
from stepscope.studies.registry import find_study
from stepscope.training.text import VOCAB, TextBatches, library_text
from view_blocks import figures_of, findings_of, tables_of

SMALL = {"size": ("tiny",), "context": 16, "batch": 1}


def measured(**flags: Any) -> Measurement:
    study = find_study("fp8")
    (case,) = study.cases(Fp8Flags(**flags))
    return study.measure(case, QuietBench())


def findings(*records: Record) -> dict[str, Finding]:
    return {finding.code: finding for finding in findings_of(find_study("fp8").view(records))}


class TestMeasured:
    def test_tensors_of_a_tiny_model(self) -> None:
        done = measured(**SMALL, part=("tensors",), steps=2, probes=1)
        probes: list[LayerProbe] = done.attachments["probes"]
        assert {each.step for each in probes} == {2}
        assert len(probes) == 14
        assert list(done.attachments["left_out"]) == ["head"]
        for each in probes:
            for gemm in each.gemms.values():
                # Rounding to 3 bits of mantissa, against 7 of bfloat16.
                assert 0 < gemm.bf16 < 0.01 < gemm.fp8["e4m3"]["tensorwise"] < 0.08
            assert 0.01 < each.casts["weight"]["e4m3"]["rowwise"].error < 0.04
            assert 0.02 < each.casts["weight"]["e5m2"]["rowwise"].error < 0.08
        # A record stores the same numbers.
        assert msgspec.convert(msgspec.to_builtins(probes), list[LayerProbe]) == probes

    def test_a_pair_starts_from_the_same_weights_and_data(self) -> None:
        done = measured(**SMALL, part=("training",), steps=3, seeds=1)
        bf16, fp8 = (series.values for series in done.series)
        assert len(bf16) == len(fp8) == 3
        assert fp8[0] == pytest.approx(bf16[0], rel=0.01)
        assert fp8 != bf16
        assert done.notes["arithmetic"] == "emulated"

    def test_a_users_model(self) -> None:
        flags = {"model": "own_models:causal_lm", "batch": 1, "steps": 2}
        done = measured(**flags, part=("tensors",), probes=1)
        assert "layers.0.qkv_proj" in {each.layer for each in done.attachments["probes"]}
        assert "the head" in done.attachments["left_out"]["lm_head"]

    def test_a_model_without_eligible_layers_is_skipped(self) -> None:
        study = find_study("fp8")
        (case,) = study.cases(Fp8Flags(size=("tiny",), context=7, batch=1, part=("tensors",)))
        with pytest.raises(CaseSkipped, match="tokens=7 is not a positive multiple of 16"):
            study.measure(case, QuietBench())


class TestLayers:
    def test_layers_without_fp8_gemms_have_a_reason(self) -> None:
        class Frozen(nn.Linear):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return super().forward(x)

        model = nn.ModuleDict(
            {
                "odd": nn.Linear(16, 20),
                "own": Frozen(20, 32),
                "first": nn.Linear(32, 32),
                "unused": nn.Linear(32, 32),
                "last": nn.Linear(32, 16),
            }
        )
        model["frozen"] = nn.Linear(32, 32).requires_grad_(False)

        def forward() -> None:
            x = torch.zeros(16, 16)
            for name in ("odd", "own", "first", "frozen", "last"):
                x = model[name](x)

        linears = linears_of(model, forward)
        assert list(linears.eligible) == ["first"]
        assert linears.left_out == {
            "odd": "out_features=20 is not a positive multiple of 16",
            "own": "Frozen has a forward of its own",
            "unused": "not called as a module in the forward pass",
            "last": "the head: the last linear layer, read by the loss",
            "frozen": "frozen: it has no weight gradient",
        }

    def test_emulated_bfloat16_is_that_of_autocast(self) -> None:
        torch.manual_seed(0)
        layer, x = nn.Linear(16, 16), torch.randn(16, 16)
        with torch.autocast("cpu", torch.bfloat16):
            expected = layer(x)
        emulate_bf16({"layer": layer})
        actual = layer(x)
        # One unit in the last place of bfloat16: the order of the sum is not specified.
        torch.testing.assert_close(actual, expected.float(), rtol=2**-7, atol=2**-9)
        assert torch.equal(actual, actual.bfloat16().float())

    def test_emulated_fp8_has_gradients_of_fp8_gemms(self) -> None:
        torch.manual_seed(0)
        layer, x = nn.Linear(32, 16), torch.randn(16, 32)
        layer(x).square().sum().backward()
        exact = layer.weight.grad
        assert exact is not None
        layer.weight.grad = None
        emulate_fp8({"layer": layer}, Recipe("delayed"))
        layer(x).square().sum().backward()
        assert layer.weight.grad is not None
        error = float((layer.weight.grad - exact).norm() / exact.norm())
        assert 0.005 < error < 0.1

    def test_one_large_value_makes_the_rest_underflow_with_one_scale(self) -> None:
        torch.manual_seed(0)
        gradient = torch.randn(64, 32)
        gradient[0, 0] = 1e7
        losses = cast_losses({"gradient": gradient})["gradient"]["e4m3"]
        assert losses["tensorwise"].underflow > 0.99
        # Only the values of its row.
        assert losses["rowwise"].underflow == pytest.approx(31 / (64 * 32))

    def test_a_gemm_loses_what_the_casts_of_its_operands_lose(self) -> None:
        torch.manual_seed(0)
        x, weight, gradient = torch.randn(64, 32), torch.randn(48, 32), torch.randn(64, 48)
        losses = gemm_losses(x, weight, gradient)
        assert set(losses["forward"].fp8) == {"e4m3"}
        for gemm in losses.values():
            for dtype, error in (("e4m3", 0.037), ("e5m2", 0.058)):
                for scaling in gemm.fp8.get(dtype, {}):
                    assert gemm.fp8[dtype][scaling] == pytest.approx(error, rel=0.2)
            assert gemm.bf16 == pytest.approx(0.0029, rel=0.3)

    @pytest.mark.parametrize("scaling", ["tensorwise", "delayed"])
    def test_kernels_are_used_where_the_device_has_them(
        self, scaling: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pretend_fp8(monkeypatch)
        monkeypatch.setattr(recipes, "unavailable", lambda *_: None)
        monkeypatch.setattr("stepscope.kernels.launch.is_interpreted", lambda: False)
        torch.manual_seed(0)
        x, weight, gradient = torch.randn(32, 32), torch.randn(16, 32), torch.randn(32, 16)
        for gemm in gemm_losses(x, weight, gradient).values():
            assert gemm.kernel is not None
            assert gemm.kernel == pytest.approx(gemm.fp8["e4m3"]["tensorwise"], rel=0.05)
        layer = nn.Linear(32, 16)
        used = use_fp8({"layer": layer}, Recipe(scaling), torch.device("cpu"))
        assert used == ("emulated" if scaling == "delayed" else "kernels")
        exact = nn.functional.linear(x, layer.weight, layer.bias)
        error = float(((layer(x.bfloat16()) - exact).norm() / exact.norm()).detach())
        assert 0.005 < error < 0.08

    def test_a_growing_tensor_saturates_under_delayed_scaling(self) -> None:
        torch.manual_seed(0)
        layer = nn.Linear(16, 16)
        observer = Observer({"layer": layer})
        for step, size in ((1, 1.0), (2, 8.0)):
            with observer.step(step, examine=True):
                layer(size * torch.randn(16, 16)).sum().backward()
        first, second = (each.saturated["input"] for each in observer.probes)
        assert first == 0.0
        assert second > 0.1


def test_batches_of_text_are_repeatable_windows() -> None:
    batches = TextBatches(2, 8, 1, torch.device("cpu"))
    tokens, targets = batches(5)
    assert tokens.shape == (2, 8)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert int(tokens.max()) < VOCAB
    assert torch.equal(batches(5)[0], tokens)
    assert not torch.equal(batches(6)[0], tokens)
    assert bytes(tokens[0].tolist()) in library_text()


class TestCases:
    def test_each_model_has_its_tensors_and_a_pair_for_each_seed(self) -> None:
        cases = find_study("fp8").cases(Fp8Flags(size=("tiny", "mini"), seeds=3))
        assert len(cases) == 2 * (1 + 3)
        assert len({case.key for case in cases}) == 8

    def test_probed_steps(self) -> None:
        def steps(steps: int, probes: int) -> tuple[int, ...]:
            (case,) = find_study("fp8").cases(
                Fp8Flags(part=("tensors",), steps=steps, probes=probes)
            )
            assert isinstance(case, TensorsCase)
            return case.probed_steps()

        assert steps(100, 4) == (1, 34, 67, 100)
        assert steps(2, 4) == (1, 2)
        assert steps(5, 1) == (5,)

    @pytest.mark.parametrize(
        ("flags", "said"),
        [
            ({"scaling": ("columnwise",)}, "scaling='columnwise' does not exist"),
            ({"gradient_dtype": "e3m4"}, "gradient_dtype='e3m4' does not exist"),
            ({"part": ("tensor",)}, "part 'tensor' does not exist"),
            ({"model": "a.b:c", "size": ("tiny",)}, "--size does not apply to a.b:c"),
            ({"steps": 1}, "steps is 1"),
        ],
    )
    def test_invalid_flags(self, flags: dict[str, Any], said: str) -> None:
        with pytest.raises(UsageError, match=said):
            Fp8Flags(**flags)


class TestFindings:
    def test_the_same_loss_is_a_yes(self) -> None:
        verdict = findings(tensors_record(), training_record(fp8=2.001), training_record(1))[
            "fp8.verdict"
        ]
        assert verdict.sentence == (
            "small can be trained in FP8, as far as 100 steps show: the final loss is the same"
            " (tensorwise scaling, 2 seeds; rounding emulated: numerics, not speed). Every eligible"
            " layer loses what rounding costs and no more."
        )
        assert verdict.tone == "good"
        assert verdict.values["answer"] == "yes"
        assert verdict.values["change"] == pytest.approx(0.00025)

    def test_another_loss_is_reported(self) -> None:
        verdict = findings(training_record(fp8=2.1), training_record(1, bf16=2.001, fp8=2.1))[
            "fp8.verdict"
        ]
        assert verdict.values["answer"] == "differs"
        assert verdict.text.startswith(
            "small trains in FP8, but not to the same loss: it ends 5.0 % above bfloat16's"
        )
        assert verdict.tone == "warn"

    def test_within_the_spread_of_bfloat16_is_the_same(self) -> None:
        pairs = (training_record(bf16=2.0, fp8=2.02), training_record(1, bf16=2.4, fp8=2.42))
        assert findings(*pairs)["fp8.verdict"].values["answer"] == "yes"

    @pytest.mark.parametrize("how", [{"diverged_at": 2}, {"fp8": 9.0}])
    def test_divergence_is_a_no(self, how: dict[str, Any]) -> None:
        verdict = findings(training_record(**how))["fp8.verdict"]
        assert verdict.values["answer"] == "no"
        assert verdict.text.startswith(
            "small cannot be trained in FP8 as it is: the loss diverges (tensorwise scaling, 1 seed"
        )

    def test_layers_that_lose_values_should_stay_in_bfloat16(self) -> None:
        lossy = tensors_record(probe("blocks.0.w1"), probe("blocks.1.w2", error=0.4))
        found = findings(lossy, training_record(arithmetic="kernels"))
        verdict = found["fp8.verdict"]
        assert verdict.values["layers"] == "blocks.1.w2"
        assert verdict.tone == "warn"
        assert "; with the FP8 kernels of this device)." in verdict.text
        assert verdict.conclusion == (
            "Keep in bfloat16: blocks.1.w2 (a GEMM loses more than 10.0 %)."
        )
        assert found["fp8.gemms"].tone == "warn"
        rowwise = findings(lossy, training_record(scaling="rowwise"))["fp8.verdict"]
        assert rowwise.values["layers"] == ""

    def test_without_trainings_the_answer_is_unknown(self) -> None:
        assert findings(tensors_record())["fp8.unknown"].text == (
            "Whether small can be trained in FP8 is unknown: no pair of trainings was run."
        )

    def test_wording_of_what_the_layers_lose(self) -> None:
        found = findings(
            tensors_record(
                probe("a", underflow=0.02), probe("b", saturated=0.25), probe("c", error=0.05)
            ),
        )
        assert found["fp8.gemms"].text == (
            "Against float64 the FP8 GEMMs of small lose (median over layers, e4m3, one scale per"
            " tensor) 3.0 % of the output, 3.0 % of the gradient of the input, 3.0 % of the"
            " gradient of the weight; bfloat16 loses at most 0.2 %. c loses most: 5.0 % of its"
            " gradient of the weight; the choice of the batch alone changes the gradient of its"
            " weight by 50.0 %."
        )
        assert found["fp8.left-out"].text == (
            "1 linear layer of small has no FP8 GEMMs: head (the head: the last linear layer, read"
            " by the loss)."
        )

    def test_pictures_and_tables(self) -> None:
        blocks = find_study("fp8").view(
            [tensors_record(), training_record(), training_record(scaling="rowwise", fp8=2.2)]
        )
        figures = figures_of(blocks)
        assert set(figures) == {"fp8-loss", "fp8-gemms"}
        labels = [curve.label for curve in figures["fp8-loss"].curves]
        assert labels == ["bf16", "FP8 tensorwise", "FP8 rowwise"]
        tables = tables_of(blocks)
        assert set(tables) == {"fp8-training", "fp8-casts", "fp8-layers"}
        assert [row[0] for row in tables["fp8-layers"].rows] == ["blocks.1.w1", "blocks.0.w1"]
