"""The workflow in examples/ci: its steps run on a repository with two commits."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "examples" / "ci"
TRAINING = """
import sys, time
import torch
from part import PAUSE_S
print(sys.argv[1:])
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(200):
    model(torch.randn(4, 8)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(PAUSE_S)
"""


def git(repository: Path, *words: str) -> str:
    name = ("-c", "user.name=t", "-c", "user.email=t@example.com")
    done = subprocess.run(
        ["git", *name, *words], cwd=repository, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository whose second commit makes a step five times as slow."""
    folder = tmp_path / "repository"
    shutil.copytree(RECIPE, folder / "examples" / "ci")
    (folder / "train.py").write_text(TRAINING)
    git(folder, "init", "--quiet")
    for pause_s in (0.01, 0.05):
        (folder / "part.py").write_text(f"PAUSE_S = {pause_s}\n")
        git(folder, "add", "--all")
        git(folder, "commit", "--quiet", "--message", f"pause {pause_s}")
    return folder


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """An environment with `stepscope` and a `gh` that prints what it is asked for."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, text in {
        "stepscope": f'exec {sys.executable} -m stepscope "$@"',
        "gh": 'echo gh "$@"; cat "${@: -1}"',
    }.items():
        path = commands / name
        path.write_text(f"#!/usr/bin/env bash\n{text}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return os.environ | {
        "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(
            filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH")))
        ),
        "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md"),
    }


def workflow_steps() -> dict[str, dict[str, Any]]:
    text = (RECIPE / "training-speed.yml").read_text()
    steps = yaml.safe_load(text)["jobs"]["compare"]["steps"]
    return {step["name"]: step for step in steps if "name" in step}


def test_workflow_compares_two_commits_and_comments(
    repository: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    steps = workflow_steps()
    # Expressions are evaluated by GitHub, in `env` only.
    assert not any("${{" in step["run"] for step in steps.values())
    base = git(repository, "rev-parse", "HEAD~1")
    few = {"BASE": base, "LIMIT": "5%", "ROUNDS": "2", "STEPS": "5"}
    run = {"cwd": repository, "capture_output": True, "text": True, "timeout": 600}
    command = ["bash", "-eo", "pipefail", "-c", steps["Compare"]["run"]]
    done = subprocess.run(command, env=environment | few, **run)
    # Two runs of each commit are too few to tell, which does not fail the job.
    assert done.returncode == 0, done.stderr
    comment = (repository / "stepscope-ci" / "comment.md").read_text()
    assert done.stdout == comment
    assert comment.startswith("### Stepscope: ⚠️ cannot tell for 1 case")
    (row,) = [line for line in comment.splitlines() if line.startswith("| inspect | train.py")]
    ratio = re.search(r"\+(\d+)\.\d%", row)
    assert ratio, row
    assert int(ratio[1]) > 100
    assert len(list((repository / "stepscope-ci" / "runs").glob("*.html"))) == 4
    assert "['--steps', '200']" in (repository / "stepscope-ci/runs/base-1.log").read_text()
    # The working tree of the base commit is removed.
    assert git(repository, "worktree", "list").count("\n") == 0

    command[-1] = steps["Comment"]["run"]
    done = subprocess.run(command, env=environment | {"PULL_REQUEST": "12"}, **run)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("gh pr comment 12 --edit-last --create-if-none")
    assert comment in done.stdout
    assert (tmp_path / "summary.md").read_text() == comment


def test_a_script_that_fails_is_named(repository: Path, environment: dict[str, str]) -> None:
    (repository / "train.py").write_text("raise SystemExit('no data')")
    git(repository, "commit", "--quiet", "--all", "--message", "broken")
    done = subprocess.run(
        ["bash", "examples/ci/compare_commits.sh", "HEAD", "train.py"],
        cwd=repository,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1
    assert "the script failed" in done.stderr
    assert "no data" in done.stderr
    assert git(repository, "worktree", "list").count("\n") == 0


def test_a_round_that_would_end_after_the_budget_is_not_started(
    repository: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "bin" / "stepscope").write_text(
        "#!/usr/bin/env bash\n"
        "while (($#)); do\n"
        '  [[ $1 != --page ]] || { sleep 1; echo "{}" >"${2%.html}.jsonl"; }\n'
        "  shift\n"
        "done\n"
    )
    done = subprocess.run(
        ["bash", "examples/ci/compare_commits.sh", "HEAD", "train.py"],
        cwd=repository,
        env=environment | {"ROUNDS": "9", "BUDGET": "5"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    told = re.search(r"(\d) of 9 rounds fit into BUDGET=5 seconds", done.stderr)
    assert told, done.stderr
    recorded = list((repository / "stepscope-ci" / "runs").glob("*.jsonl"))
    assert len(recorded) == 2 * int(told[1]) <= 6
