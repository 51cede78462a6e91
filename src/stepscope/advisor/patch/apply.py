"""Write verified changes into the user's source as a patch, and measure the patched script."""

from __future__ import annotations

import os
import shlex
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from stepscope.advisor.advise.cases import BASE, CHANGED, Script, Trial
from stepscope.advisor.advise.interleaved import TrialProcess
from stepscope.advisor.advise.script_trial import Runs, Shows, Times, compared_times, order_of
from stepscope.advisor.inspect.order import Order
from stepscope.advisor.inspect.recording import run_observer
from stepscope.advisor.patch.edits import Edits
from stepscope.advisor.patch.losses import Losses, compare_losses
from stepscope.advisor.patch.sites import SITES, ByHand, Sites
from stepscope.advisor.patch.source import unified_diff
from stepscope.advisor.scope.overlay import write_overlay
from stepscope.errors import StepscopeError
from stepscope.files import replace_file
from stepscope.records.stats import FEWEST_PAIRS, Judgement, judge
from stepscope.report.format import duration, percent
from stepscope.version import __version__


class Gain(msgspec.Struct, frozen=True, kw_only=True):
    """The patched script against the original."""

    base_ms: float
    changed_ms: float
    times: Judgement
    losses: Losses
    rounds: int

    @property
    def shown(self) -> bool:
        """Whether the patched script is faster, with the same losses."""
        return not self.why_not

    @property
    def why_not(self) -> str:
        """Why it is not shown to be; empty if it is."""
        if self.times.outcome == "too few samples":
            return (
                f"{self.rounds} rounds are too few to show a gain ({FEWEST_PAIRS} are needed): let"
                " the script run longer"
            )
        if self.times.outcome != "faster":
            return "the patched script is not shown to be faster"
        return {
            "alike": "",
            "differ": "its losses differ",
            "cannot tell": "its losses cannot be compared",
        }[self.losses.outcome]


class Patch(msgspec.Struct, frozen=True, kw_only=True):
    """Edits of a script's files."""

    script: Script
    title: str
    files: dict[str, bytes]
    """New contents by path."""
    originals: dict[str, bytes]
    made: tuple[str, ...]
    by_hand: tuple[ByHand, ...]

    @property
    def root(self) -> Path:
        """Folder that the paths of the patch begin at: that of the repository, if all are in it."""
        files = [Path(one) for one in self.files]
        for folder in files[0].parents:
            if (folder / ".git").exists() and all(one.is_relative_to(folder) for one in files):
                return folder
        return Path(os.path.commonpath([one.parent for one in files]))

    def text(self, path: Path, gain: Gain | None, device: str) -> str:
        """The patch, with what it does and gains in its first lines."""
        where, root = shlex.quote(str(path.absolute())), shlex.quote(str(self.root))
        program = shlex.join(["-m"] * self.script.module + [self.script.target, *self.script.words])
        head = [
            f"{self.title}, by Stepscope {__version__}",
            f"program: {program}",
            *gain_lines(gain, device),
            f"apply: {self.apply_command(path)}",
            f"   or: patch -p1 --binary -d {root} < {where}",
            "undo: the same with -R",
            *by_hand_lines(self.by_hand),
        ]
        parts = [
            unified_diff(os.path.relpath(one, self.root), self.originals[one], new)
            for one, new in sorted(self.files.items())
        ]
        return "".join(f"# {line}\n" for line in head) + "".join(parts)

    def apply_command(self, path: Path) -> str:
        """The command that applies the patch in a file."""
        return shlex.join(["git", "-C", str(self.root), "apply", str(path.absolute())])

    def write_files(self) -> None:
        """Apply the patch, unless a file has changed since it was read."""
        for path, old in self.originals.items():
            if Path(path).read_bytes() != old:
                raise StepscopeError(f"{path} has changed meanwhile", "run the command again")
        for path, new in self.files.items():
            replace_file(Path(path), [new])


def gain_lines(gain: Gain | None, device: str) -> list[str]:
    """What was measured, in one or two lines."""
    if gain is None:
        return ["not measured"]
    ratio = gain.times.ratio
    low, high = 1 / ratio.high, 1 / ratio.low
    return [
        f"measured on {device}: {duration(gain.changed_ms)} instead of {duration(gain.base_ms)} a"
        f" step, {1 / ratio.value:.2f}x as fast ({ratio.level:.0%} interval {low:.2f} to"
        f" {high:.2f}, {gain.rounds} rounds)",
        f"losses over {gain.losses.steps} steps: {_losses(gain.losses)}",
    ]


def _losses(losses: Losses) -> str:
    if losses.outcome == "cannot tell":
        return f"cannot be compared: {losses.why}"
    if losses.why:
        return losses.why
    apart = f"mean difference {percent(losses.value)} [{percent(losses.low)}, "
    words = {"alike": "no difference beyond rounding", "differ": "they differ"}
    return f"{apart}{percent(losses.high)}], {words[losses.outcome]}"


def by_hand_lines(by_hand: Sequence[ByHand]) -> list[str]:
    return [
        f"by hand: {one.what}{f' ({one.where})' if one.where else ''}: {one.why}" for one in by_hand
    ]


def observe_sites(script: Script) -> Sites:
    """Run a few steps of the script to see where its source makes what."""
    with tempfile.TemporaryDirectory(prefix="stepscope-patch-") as name:
        folder = Path(name)
        _, why = run_observer(order_of(script, observe="sites"), folder)
        if (folder / SITES).exists():
            found = msgspec.json.decode((folder / SITES).read_bytes(), type=Sites)
            if found.steps:
                return found
        raise StepscopeError(why)


def make_patch(script: Script, settings: Mapping[str, str], title: str) -> Patch:
    """Make the edits for these settings; the files stay as they are."""
    edits = Edits(settings, observe_sites(script)).make()
    files = edits.changed
    return Patch(
        script=script,
        title=title,
        files=files,
        originals={path: edits.sources[path].data for path in files},
        made=tuple(edits.made),
        by_hand=tuple(edits.by_hand),
    )


def measure_patch(patch: Patch, rounds: int, loss_steps: int, bench: Shows) -> Gain:
    """Run the patched script interleaved with the original, each in its own process with nothing
    but a time stamp and the loss at each step."""
    with tempfile.TemporaryDirectory(prefix="stepscope-patch-") as name:
        overlay = Path(name) / "overlay.json"
        write_overlay(overlay, {os.path.realpath(p): new for p, new in patch.files.items()})
        orders = {
            BASE: order_of(patch.script),
            CHANGED: order_of(patch.script, overlay=str(overlay)),
        }
        return gain_of(compare_orders(orders, patch.script, rounds, loss_steps, bench))


def compare_orders(
    orders: Mapping[str, Order], script: Script, rounds: int, loss_steps: int, bench: Shows
) -> Times:
    """Time two programs, interleaved."""
    trial = Trial(program=script, advice=(), rounds=rounds, loss_steps=loss_steps, step_ms=1.0)

    def start(
        _: Script, name: str, settings: dict[str, str], waiting: Callable[[], None]
    ) -> TrialProcess:
        return TrialProcess(orders[name], settings, waiting)

    runs = Runs(start)
    try:
        # Untimed steps between turns cost little next to a wrong first step.
        return compared_times(trial, script, bench, runs, on_cpu=False)
    finally:
        runs.close()


def gain_of(times: Times) -> Gain:
    base, changed = times.ms[BASE], times.ms[CHANGED]
    judgement = judge(base, changed, "paired")
    middle = sorted(base)[len(base) // 2]
    return Gain(
        base_ms=middle,
        changed_ms=middle * judgement.ratio.value,
        times=judgement,
        losses=compare_losses(times.losses.get(BASE, ()), times.losses.get(CHANGED, ())),
        rounds=len(base),
    )
