"""`stepscope advise --apply`: the verified changes as a patch of the script, measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from stepscope.advisor.advise.cases import STUDY_NAME as TRIALS
from stepscope.advisor.advise.outcome import Tried, best_of
from stepscope.advisor.patch.apply import (
    Gain,
    Patch,
    by_hand_lines,
    gain_lines,
    make_patch,
    measure_patch,
)
from stepscope.cli.common import require_writable, write_text
from stepscope.cli.messages import log
from stepscope.errors import StepscopeError, UsageError
from stepscope.records.schema import Record
from stepscope.records.stats import FEWEST_PAIRS


class Silent:
    """Progress that is not shown."""

    def progress(self, done: int, total: int, what: str) -> None:
        """Show nothing."""


def apply_verified(
    records: Sequence[Record],
    path: Path | None,
    *,
    in_place: bool,
    keep: bool,
    rounds: int,
    loss_steps: int,
) -> int:
    """Write the patch of the best verified changes, and apply it if that is requested; return the
    exit code."""
    tried = [Tried(record) for record in records if record.study == TRIALS]
    if not tried:
        raise UsageError(
            "no change of this step was verified",
            "use `stepscope advise --apply SCRIPT`, which verifies changes first",
        )
    working = [one for one in tried if one.works and one.ratio is not None]
    best = best_of(tried)
    if best is None and keep:
        best = min(working, key=lambda one: one.ratio.value if one.ratio else 1.0, default=None)
    if best is None:
        log("no patch: no change was shown to be faster with the same losses")
        return 0
    script = best.trial.program
    if script is None:
        raise UsageError("--apply needs a script", "--model has no training loop to edit")
    if not script.module and not Path(script.target).is_file():
        raise UsageError(
            f"{script.target} is not in this folder", "run the command where the script was tried"
        )
    path = path or Path(f"{Path(script.target).stem}.stepscope.patch")
    require_writable(path, "choose another path with --patch")
    title = ", ".join(one.title for one in best.trial.advice)
    patch = make_patch(script, best.trial.settings, title)
    for line in by_hand_lines(patch.by_hand):
        log(line)
    if not patch.files:
        log("no patch: none of the changes can be made safely in the source")
        return 1
    gain = _measured(patch, rounds, loss_steps)
    device = best.record.environment.device_name
    for line in gain_lines(gain, device):
        log(line)
    if not (keep or (gain is not None and gain.shown)):
        if gain is not None:
            log(f"no patch: {gain.why_not} (--keep writes it)")
        return 0 if gain is not None else 1
    write_text(path, patch.text(path, gain, device))
    log(f"patch: {path}")
    if in_place:
        patch.write_files()
        log(f"changed: {', '.join(sorted(patch.files))}")
    else:
        log(f"apply it: {patch.apply_command(path)}")
    return 0


def _measured(patch: Patch, rounds: int, loss_steps: int) -> Gain | None:
    """Run the patched script; None if it does not run."""
    log(f"running the patched {patch.script.target} interleaved with the original")
    try:
        return measure_patch(patch, max(rounds, FEWEST_PAIRS), loss_steps, Silent())
    except StepscopeError as error:
        log(f"the patched script could not be compared: {error}")
        return None
