"""A change from outside the package, through the interface that CONTRIBUTING describes."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest

from command_line import CommandLine, python
from stepscope.advisor.trial.backwards import Backwards
from stepscope.advisor.trial.changes import Changes
from stepscope.analysis.advice.changes import setting_of
from stepscope.analysis.advice.rule import REGISTRY, Stage
from stepscope.records.schema import Ceiling

CODES = ["flush-denormals", "fused-optimizer"]


def test_a_change_from_outside_is_predicted_searched_and_tried(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent("""
        import torch
        model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(12)))
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        x = torch.randn(512, 64) * 1e-37
        for step in range(100_000):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        """)
    )
    command = CommandLine(tmp_path)
    command.environment |= {"STEPSCOPE_CHANGES": "planted_change", "OMP_NUM_THREADS": "1"}
    command.know_ceilings(
        Ceiling(name="memory.copy", value=1e15, unit="B/s", source="measured", detail="planted")
    )
    only = ",".join(CODES)
    done = command("advise", "--verify", "--rounds", "5", "--json", "--only", only, str(script))
    assert done.returncode == 0, done.stderr
    output = json.loads(done.stdout)
    (advised,) = (one for one in output["advice"] if one["code"] == CODES[0])
    assert advised["gain_ms"] > 0
    tried = {frozenset(one["change"].split("+")): one for one in output["tried"]}
    assert frozenset(CODES) in tried, "the combination"
    for codes, one in tried.items():
        if CODES[0] in codes:
            assert not one["verdict"].startswith("not tried"), one


def test_rules_are_sorted_by_stage_and_their_settings_can_be_made() -> None:
    stages = [entry.stage for entry in REGISTRY]
    assert stages == sorted(stages)
    assert {stage.name for stage in stages} == {stage.name for stage in Stage}
    with pytest.raises(StopIteration):
        setting_of("optimizer", "unknown")
    assert setting_of("optimizer", "foreach") is not setting_of("accelerate", "accelerate")


def test_a_module_of_changes_that_cannot_be_imported_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("STEPSCOPE_CHANGES", "nowhere.at_all")
    done = python("-m", "stepscope", "advise", "--help")
    assert done.returncode == 2
    assert "STEPSCOPE_CHANGES names nowhere.at_all" in done.stderr


@pytest.mark.usefixtures("torch_as_it_was")
def test_a_change_without_effect_ends_with_the_reason_of_its_file() -> None:
    changes = Changes({"gradients": "none", "optimizer": "foreach"}, Backwards())
    changes.on_torch_imported()
    assert changes.without_effect() == {
        "gradients": "zero_grad() does not fill gradients with zeros",
        "optimizer": "no optimizer with another implementation is created",
    }
