"""The example scripts of plain torch run directly and as models of the study `own`."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

from stepscope.studies.own.building import build, call, loss_of

FOLDER = Path(__file__).parents[2] / "examples"
EXAMPLES = [FOLDER / f"{name}.py" for name in ("nano_gpt", "slow", "vit")]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", [str(path), "--steps", "12", "--batch", "2"])
    runpy.run_path(str(path), run_name="__main__")
    losses = [float(line.rpartition(" ")[2]) for line in capsys.readouterr().out.splitlines()]
    assert len(losses) == 2
    assert all(0 < loss < 20 for loss in losses)


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
