"""Kill -9 at a random moment: nothing finished is lost, nothing is repeated, nothing survives."""

from __future__ import annotations

from pathlib import Path

import pytest

from kill_loop import kill_runs


@pytest.mark.timeout(600)
def test_killed_runs_resume(tmp_path: Path) -> None:
    # With this seed most kills come while cases are measured.
    tally = kill_runs(tmp_path, kills=5, seed=20260102)
    assert tally.kills == 5
