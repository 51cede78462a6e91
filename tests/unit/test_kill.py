"""Kill -9 at a random moment: nothing finished is lost, nothing is repeated, nothing survives."""

from __future__ import annotations

from pathlib import Path

import pytest

from kill_loop import kill_runs


@pytest.mark.timeout(600)
def test_killed_runs_resume(tmp_path: Path) -> None:
    # With this seed the first kill comes during startup, the others while cases are measured.
    tally = kill_runs(tmp_path, kills=5, seed=20260110)
    assert tally.kills == 5
    assert tally.kills_while_measuring >= 2
