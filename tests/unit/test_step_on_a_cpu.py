"""The step study on a CPU, where most changes do not apply."""

from __future__ import annotations

import json
import os
from pathlib import Path

from command_line import CommandLine
from stepscope.cli.commands.run import PresetCases, StudyCases
from stepscope.studies.registry import find_study
from stepscope.studies.step.cases import StepFlags

STUDY = find_study("step")
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def test_on_a_cpu_the_quick_preset_replaces_default_flags() -> None:
    assert StudyCases(STUDY, StepFlags(), chosen=False).on_cpu() == PresetCases("quick", "step")
    assert StudyCases(STUDY, StepFlags(), chosen=True).on_cpu() is None
    other = find_study("benchmark")
    assert StudyCases(other, other.flags(), chosen=False).on_cpu() is None


def test_on_a_cpu_changes_that_do_not_apply_are_skipped_rows(cli: CommandLine) -> None:
    done = cli.line(
        "run step --part ladder --size tiny --context 8 --batch 1 --vocab 32 --layers 1"
        " --min-seconds 0 --device cpu --rungs tf32 flash --no-report"
    )
    assert done.returncode == 0, done.stderr
    statuses = {record.config["rung"]: record.status for record in cli.records()}
    assert statuses == {"start": "ok", "tf32": "skipped", "flash": "ok"}


def test_loss_curves_run_from_the_command_line(cli: CommandLine) -> None:
    cli.environment["STEPSCOPE_STUDIES"] = "step_loss"
    cli.environment["PYTHONPATH"] += f"{os.pathsep}{BENCHMARKS}"
    done = cli.line(
        "run step-loss --device cpu --size tiny --context 8 --vocab 32 --steps 4 --rungs flash"
        " --seeds 0 --json"
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["status"] == {"ok": 2}


def test_a_race_runs_from_the_command_line(cli: CommandLine) -> None:
    cli.environment["STEPSCOPE_STUDIES"] = "step_race"
    cli.environment["PYTHONPATH"] += f"{os.pathsep}{BENCHMARKS}"
    # In Triton's interpreter, which users do not have, the loss of the race takes 20 s.
    cli.environment.pop("TRITON_INTERPRET", None)
    done = cli.line(
        "run step-race --device cpu --race tiny-64 --blocks 2 --block-seconds 0.05 --rounds 1"
        " --min-seconds 0 --json"
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["status"] == {"ok": 1}
    done = cli("run", "step-race", "--race", "8b-32768", "--device", "cpu")
    assert done.returncode == 2
    assert "CUDA graphs exist on NVIDIA GPUs" in done.stderr
