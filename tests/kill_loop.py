"""Kill a run with SIGKILL at random moments, repeatedly, until the run is complete.

After each kill the store opens, every announced record is in it exactly once, and no worker is
left. At the end every case is in it exactly once.

The moments come from a seed: during startup, or so many announcements and a fraction of a case
later. On a slow machine they are the same.
"""

from __future__ import annotations

import random
import re
import signal
import threading
import time
from pathlib import Path

from command_line import CommandLine
from stepscope.records.store import Store

ANNOUNCED = re.compile(r"^\[\d+/\d+\] planted (\S+):", re.MULTILINE)
CASE_S = 0.02
STARTUP_S = 0.5
"""Less than a run takes."""
STARTUP_SHARE = 0.2
"""Share of kills during startup."""


class Tally:
    """Counts over a series of rounds."""

    def __init__(self) -> None:
        self.rounds = self.kills = self.runs_to_the_end = 0
        self.announced = self.stored_unannounced = 0
        self.kills_before_a_store = self.kills_while_measuring = 0

    def __str__(self) -> str:
        return (
            f"{self.kills} kills in {self.rounds} rounds"
            f" ({self.kills_before_a_store} before the store existed,"
            f" {self.kills_while_measuring} after the first record):"
            f" all {self.announced} announced records stored exactly once;"
            f" {self.stored_unannounced} more were stored just before their announcement;"
            " every store opened, no worker survived"
        )


class Round:
    """One run in one directory, killed until it is complete or was killed often enough."""

    def __init__(self, folder: Path, chance: random.Random, tally: Tally, *, cases: int) -> None:
        self.cli = CommandLine(folder)
        self.cli.know_ceilings()
        self.chance = chance
        self.tally = tally
        self.words = (
            "run",
            "planted",
            "--times",
            str(cases),
            "--seconds",
            str(CASE_S),
            "--device",
            "cpu",
            "--no-report",
            "--resume",
        )
        self.cases = [f"ok-{number}" for number in range(cases)]
        self.announced: list[str] = []

    def play(self, kills: int) -> None:
        """Kill it so often, then let it finish."""
        for _ in range(kills):
            left = len(self.cases) - len(self.announced)
            if left < 3:
                break
            if self.chance.random() < STARTUP_SHARE:
                struck = self._kill_once(0, self.chance.uniform(0.0, STARTUP_S))
            else:
                # Enough cases remain for a kill that is late.
                after = self.chance.randint(1, left // 3)
                struck = self._kill_once(after, self.chance.uniform(0.0, CASE_S))
            if not struck:
                break
            self._check_after_kill()
        self._finish()
        self.tally.rounds += 1

    def _kill_once(self, announcements: int, delay_s: float) -> bool:
        """Kill it so long after so many announcements. Return whether that hit a live run."""
        process = self.cli.start(*self.words)
        output: list[str] = []
        ready = threading.Event()

        def read() -> None:
            # Drain the pipe while the run continues: announcements before the kill count.
            seen = 0
            for line in process.stderr or ():
                output.append(line)
                seen += ANNOUNCED.match(line) is not None
                if seen >= announcements:
                    ready.set()
            ready.set()

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        if announcements:
            ready.wait()
        time.sleep(delay_s)
        process.send_signal(signal.SIGKILL)
        process.wait()
        # Workers have no copy of the pipes, so the thread ends with the runner.
        reader.join()
        if process.stdout is not None:
            process.stdout.close()
        if process.stderr is not None:
            process.stderr.close()
        new = ANNOUNCED.findall("".join(output))
        self.announced += new
        if process.returncode != -signal.SIGKILL:
            assert process.returncode == 0, "".join(output)
            return False
        self.tally.kills += 1
        self.tally.kills_while_measuring += bool(new)
        return True

    def _check_after_kill(self) -> None:
        assert self.cli.left_behind() == [], "a worker outlived its runner"
        if not (self.cli.out / "records.db").exists():
            self.tally.kills_before_a_store += 1
            assert self.announced == []
            return
        saved = self._stored()
        assert set(self.announced) <= set(saved), "an announced record is missing"
        self.tally.stored_unannounced += len(set(saved) - set(self.announced))
        # From here on they count as announced and must not be repeated either.
        self.announced = saved

    def _stored(self) -> list[str]:
        # Opened as by a run: a store killed before its first table was created is completed.
        with Store(self.cli.out / "records.db") as store:
            saved = [record.case for record in store.records(all_attempts=True)]
        assert len(saved) == len(set(saved)), "a record is stored twice"
        return saved

    def _finish(self) -> None:
        done = self.cli(*self.words)
        assert done.returncode == 0, done.stderr
        assert not set(self.announced) & set(ANNOUNCED.findall(done.stderr)), "a case was repeated"
        assert sorted(self._stored()) == sorted(self.cases)
        assert self.cli.left_behind() == []
        self.tally.announced += len(self.cases)
        self.tally.runs_to_the_end += 1


def kill_runs(folder: Path, kills: int, seed: int, *, cases: int = 60, per_round: int = 5) -> Tally:
    """Perform the requested number of kills, in rounds of a few."""
    tally, chance = Tally(), random.Random(seed)
    while tally.kills < kills:
        wanted = min(per_round, kills - tally.kills)
        Round(folder / f"round-{tally.rounds}", chance, tally, cases=cases).play(wanted)
    return tally
