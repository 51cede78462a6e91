"""The example scripts that need only torch run directly and as models of the study `own`."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import torch

from stepscope.training.building import build, call, loss_of

FOLDER = Path(__file__).parents[2] / "examples"
EXAMPLES = [FOLDER / f"{name}.py" for name in ("nano_gpt", "slow", "vit")]
OWN_CLASSES = FOLDER / "cs336_lm.py"
OF_OTHER_LIBRARIES = {
    *("hf_fsdp2", "hf_llama", "hf_trainer", "lightning_gpt", "timm_vit"),
    *("callbacks_accelerate", "callbacks_hf", "callbacks_lightning", "torchtitan_stepscope"),
}
"""Run by tests/integrations: test_accelerated_examples.py, test_callbacks.py and
test_cluster_recipes.py."""


def output_of(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *flags: str
) -> str:
    monkeypatch.syspath_prepend(str(FOLDER))
    size = ("--device", "cpu") if path == OWN_CLASSES else ("--batch", "2")
    monkeypatch.setattr("sys.argv", [str(path), "--steps", "12", *size, *flags])
    runpy.run_path(str(path), run_name="__main__")
    return capsys.readouterr().out


def losses_in(output: str) -> list[float]:
    return [float(value) for value in re.findall(r"\d: loss (\S+)$", output, re.MULTILINE)]


def test_every_example_is_tested() -> None:
    here = {path.stem for path in FOLDER.glob("*.py")}
    # The kernel has tests of its own, in tests/kernels.
    # That of FSDP2 with several ranks, in tests/distributed.
    others = {OWN_CLASSES.stem, "harness", "weighted_sum", "fsdp2"}
    assert here == {path.stem for path in EXAMPLES} | OF_OTHER_LIBRARIES | others


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    losses = losses_in(output_of(path, monkeypatch, capsys))
    assert len(losses) == 2
    assert all(0 < loss < 20 for loss in losses)


def test_a_model_of_own_classes_trains_as_before(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    plain, fused = (
        output_of(OWN_CLASSES, monkeypatch, capsys, *flags) for flags in ((), ("--accelerate",))
    )
    # Losses of the first and the last step, in one line.
    assert plain.splitlines()[0] == fused.splitlines()[0]
    assert "on a CPU it is compiled on request only" in fused
    assert "accelerated" not in plain


def test_an_accelerated_example_trains_as_before(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # As on a reader's machine, where kernels do not run in Triton's interpreter.
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    plain, fused = (
        output_of(FOLDER / "nano_gpt.py", monkeypatch, capsys, *flags)
        for flags in ((), ("--accelerate",))
    )
    assert losses_in(fused) == pytest.approx(losses_in(plain), rel=1e-4)
    for output in (plain, fused):
        assert re.search(r"^step [\d.]+ ms, [\d,]+ tokens/s$", output, re.MULTILINE)
        assert re.search(r"^peak memory [\d.]+ GiB$", output, re.MULTILINE)
    assert "on a CPU it is compiled on request only" in fused
    assert "step: 0 CUDA graphs" in fused


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_a_model_of_the_study_own(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(path.parents[1]))
    name = f"examples.{path.stem}:build"
    built = build(name)
    batch = built.make_batch(2, torch.device("cpu"))
    loss_of(call(built.model, batch), batch, built.loss, name).backward()
    assert all(p.grad is not None for p in built.model.parameters())
