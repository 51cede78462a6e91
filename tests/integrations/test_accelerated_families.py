"""Every family of models trains as before, in every way in which their libraries train them, and
the table of docs/accelerate.md is what happens."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import vision
from torch import nn

import stepscope

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import acceleration_matrix as matrix  # noqa: E402

matrix.prepare()
STEPS = 20
DTYPE = torch.float16
"""Of autocast: a CPU without bfloat16 instructions takes ten times as long with it."""


@pytest.fixture(autouse=True)
def _without_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run what runs on a CPU: the kernels have tests of their own."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def _family(name: str) -> matrix.Family:
    family = matrix.FAMILIES[name]
    if family.library == "timm":
        vision.require("timm")
    return family


def trained(
    family: str,
    accelerate: bool,
    steps: int = STEPS,
    change: Callable[[Any], nn.Module | None] = lambda _: None,
    unchecked: int = 0,
) -> list[float]:
    one = _family(family)
    model = one.create()
    model = change(model) or model
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    report = stepscope.accelerate(model, optimizer) if accelerate else None
    losses = []
    for step in range(steps):
        with torch.autocast("cpu", DTYPE):
            loss = matrix.loss_of(model, one.batch_of(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    if report is not None:
        assert report.replaced
        assert report.unchecked == unchecked
    return losses


@pytest.mark.parametrize("family", matrix.FAMILIES)
def test_losses_over_twenty_steps(family: str) -> None:
    assert trained(family, True) == pytest.approx(trained(family, False), rel=5e-3)


@pytest.mark.parametrize("family", matrix.FAMILIES)
def test_the_table_is_what_happens(family: str) -> None:
    _family(family)
    (recorded,) = (line for line in matrix.read(ROOT / "results") if line["family"] == family)
    assert recorded | matrix.row(family) == recorded


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("family", ["Llama", "GPT-2"])
def test_gradient_checkpointing_of_transformers(family: str, reentrant: bool) -> None:
    def change(model: Any) -> None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        if reentrant:
            model.enable_input_require_grads()

    expected, actual = (trained(family, fused, 6, change) for fused in (False, True))
    assert actual == pytest.approx(expected, rel=5e-3)


@pytest.mark.parametrize("when", ["before", "after"])
def test_lora(when: str) -> None:
    """Adapters that are added before or after the model is accelerated; frozen weights get no
    gradient and do not change."""
    import peft

    one = matrix.FAMILIES["Llama"]
    results = []
    for accelerate in (False, True):
        model = one.create()
        if accelerate and when == "after":
            stepscope.accelerate(model)
        torch.manual_seed(1)
        config = peft.LoraConfig(
            r=4, target_modules=["q_proj", "v_proj", "up_proj"], init_lora_weights=False
        )
        adapted = peft.get_peft_model(model, config)
        if accelerate and when == "before":
            report = stepscope.accelerate(adapted)
            reasons = {left.piece: left.reason for left in report.left}
            assert reasons["attention"] == "its projections are not plain linear layers"
        frozen = {n: p.detach().clone() for n, p in adapted.named_parameters() if "lora" not in n}
        learned = [p for p in adapted.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(learned, lr=1e-2)
        losses = []
        for step in range(8):
            with torch.autocast("cpu", DTYPE):
                loss = matrix.loss_of(adapted, one.batch_of(step))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        for name, value in frozen.items():
            parameter = adapted.get_parameter(name)
            assert torch.equal(parameter, value)
            assert parameter.grad is None
        results.append(losses)
    assert results[1] == pytest.approx(results[0], rel=5e-3)


@pytest.mark.parametrize("how", ["blocks", "model"])
def test_compiled_with_inductor(how: str) -> None:
    """Of an accelerated model; compiled parts run the original forward."""

    def change(model: Any) -> None:
        for module in model.model.layers[:1] if how == "blocks" else [model]:
            module.compile(dynamic=False)

    expected = trained("Llama", False, 3)
    if how == "model":
        one = matrix.FAMILIES["Llama"]
        model = one.create()
        stepscope.accelerate(model)
        compiled = torch.compile(model, dynamic=False)
        with torch.autocast("cpu", DTYPE):
            loss = matrix.loss_of(compiled, one.batch_of(0))
        assert float(loss.detach()) == pytest.approx(expected[0], rel=5e-3)
    else:
        # The block, its attention, MLP and norms are never called, and so not compared.
        actual = trained("Llama", True, 3, change, unchecked=5)
        assert actual == pytest.approx(expected, rel=5e-3)


def test_a_model_that_is_saved_and_loaded_by_transformers(tmp_path: Path) -> None:
    one = matrix.FAMILIES["Llama"]
    model: Any = one.create()
    stepscope.accelerate(model)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).train()
    assert loaded.state_dict().keys() == model.state_dict().keys()
    batch = one.batch_of(0)
    expected = float(matrix.loss_of(model, batch).detach())
    assert float(matrix.loss_of(loaded, batch).detach()) == pytest.approx(expected, rel=1e-5)


def test_generation_between_steps() -> None:
    one = matrix.FAMILIES["Llama"]
    plain: Any = one.create()
    fused: Any = one.create()
    stepscope.accelerate(fused)
    matrix.loss_of(fused, one.batch_of(0)).backward()
    tokens = one.batch_of(1)["input_ids"]
    generated = [
        model.eval().generate(tokens, max_new_tokens=4, do_sample=False, use_cache=True)
        for model in (plain, fused)
    ]
    assert torch.equal(*generated)
