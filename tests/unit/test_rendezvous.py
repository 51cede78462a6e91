"""Directory shared by the ranks of one torchrun: private and with a random name."""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from stepscope.advisor.inspect.background import Background
from stepscope.advisor.inspect.rendezvous import SharedDirectory, shared_directory


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "0")
    return tmp_path


@pytest.fixture
def led(home: Path) -> Iterator[SharedDirectory]:
    assert home.exists()
    first = shared_directory()
    yield first
    first.leave()


def follow(monkeypatch: pytest.MonkeyPatch) -> SharedDirectory:
    monkeypatch.setenv("LOCAL_RANK", "1")
    return shared_directory(within_s=0.2)


def test_ranks_share_a_private_directory_with_a_random_name(
    led: SharedDirectory, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = shared_directory()
    assert again.folder != led.folder
    second = follow(monkeypatch)
    assert (second.folder, second.leads, second.alone) == (again.folder, False, "")
    assert stat.S_IMODE(second.folder.stat().st_mode) == 0o700
    second.leave()
    assert again.folder.exists()
    again.leave()
    led.leave()
    assert not list((home / "tmp").iterdir())
    assert not list((home / "cache" / "stepscope" / "inspect").iterdir())


def test_single_rank_needs_no_rendezvous(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    result = shared_directory()
    assert (result.leads, result.alone, result.invitation) == (True, "", None)
    assert not (home / "cache").exists()
    result.leave()


def test_each_attempt_has_its_own_directory(
    led: SharedDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    second = follow(monkeypatch)
    assert second.folder != led.folder
    assert "created no directory within 0.2 s" in second.alone
    second.leave()


def plant_link(folder: Path, home: Path) -> None:
    (home / "elsewhere").mkdir(mode=0o700)
    folder.rmdir()
    folder.symlink_to(home / "elsewhere")


def open_to_others(folder: Path, home: Path) -> None:
    assert home.exists()
    folder.chmod(0o777)


@pytest.mark.parametrize(
    ("plant", "expected"),
    [(plant_link, "is not a directory"), (open_to_others, "other users can enter")],
)
@pytest.mark.parametrize("planted", ["the directory", "the directory of the invitation"])
def test_directory_open_to_others_is_refused_and_the_program_still_runs(
    led: SharedDirectory,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    plant: object,
    expected: str,
    planted: str,
) -> None:
    directory = led.folder
    if planted != "the directory":
        directory = home / "cache" / "stepscope" / "inspect"
        led.leave()
    plant(directory, home)  # type: ignore[operator]
    second = follow(monkeypatch)
    assert expected in second.alone
    assert second.folder.resolve() != directory.resolve()
    assert second.folder.stat().st_uid == os.geteuid()
    second.leave()
    assert not second.folder.exists()


def test_directory_of_another_user_is_refused(
    led: SharedDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: led.folder.stat().st_uid + 1)
    second = follow(monkeypatch)
    assert "belongs to user" in second.alone
    second.leave()


def test_each_of_several_machines_has_its_own_page(monkeypatch: pytest.MonkeyPatch) -> None:
    from stepscope.cli.commands.inspect import _page_of_this_machine

    page = Path("out/train.html")
    assert _page_of_this_machine(page) == page
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    monkeypatch.setenv("GROUP_RANK", "1")
    assert _page_of_this_machine(page) == Path("out/train.node-1.html")


def test_background_work_has_low_priority_until_it_is_waited_for() -> None:
    begun, seen = threading.Event(), []

    def work() -> str:
        seen.append(os.sched_getscheduler(0))
        begun.set()
        deadline = time.monotonic() + 20
        while os.sched_getscheduler(0) == os.SCHED_IDLE and time.monotonic() < deadline:
            time.sleep(0.01)
        seen.append(os.sched_getscheduler(0))
        return "done"

    background = Background(work)
    assert begun.wait(20)
    assert background.result() == "done"
    assert seen == [os.SCHED_IDLE, os.SCHED_OTHER]
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_background_error_is_raised_by_result() -> None:
    def fails() -> None:
        raise OSError("planned")

    with pytest.raises(OSError, match="planned"):
        Background(fails).result()
