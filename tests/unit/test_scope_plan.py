"""Torch-free logic of `inspect`: step detection, stages, arguments, reasons for a missing page."""

from __future__ import annotations

import sys
from itertools import cycle, islice
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.advisor.inspect.progress import Progress, why_nothing
from stepscope.advisor.scope.anchor import Anchor
from stepscope.advisor.scope.stages import Effort, Stage
from stepscope.advisor.scope.torch_import import when_imported
from stepscope.cli.commands.inspect import InspectOptions
from stepscope.cli.scripts import split_words
from stepscope.errors import UsageError


def ends(calls: str) -> str:
    """Return the optimizers whose step ended a training step, in order."""
    anchor = Anchor()
    return "".join(call for call in calls if anchor.ends_step(call))


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ("AAAA", "AAAA"),
        ("ABABABABAB", "ABBBB"),
        ("ABCABCABCABC", "ACCC"),
        ("DDDGDDDGDDDGDDDG", "DDDGGG"),
        ("ABBABBABBABB", "ABAA"),
        ("AAPAAAAAAAAA", "AAAAAAA"),
    ],
)
def test_step_is_one_full_iteration_of_the_loop(calls: str, expected: str) -> None:
    assert ends(calls) == expected


def test_unused_optimizer_is_not_waited_for() -> None:
    assert ends("P" + "A" * 10) == "P" + "A" * 9


def test_frozen_anchor_stays() -> None:
    anchor = Anchor()
    assert [anchor.ends_step("A") for _ in range(3)] == [True] * 3
    anchor.freeze()
    assert [anchor.ends_step(name) for name in "AAAGAAAG"] == [n == "A" for n in "AAAGAAAG"]


@given(st.lists(st.sampled_from("ABCD"), min_size=1, max_size=6))
def test_every_iteration_ends_once_after_the_first_ones(turn: list[str]) -> None:
    calls = "".join(islice(cycle(turn), 24 * len(turn)))
    anchor = Anchor()
    ended = [anchor.ends_step(call) for call in calls]
    later = ended[12 * len(turn) :]
    each = [sum(later[i : i + len(turn)]) for i in range(0, len(later), len(turn))]
    rarest = min(turn.count(name) for name in turn)
    assert each == [rarest] * len(each)


def test_stages_in_order() -> None:
    effort = Effort(warmup=1, timed=2, traced=2)
    assert [effort.stage(n) for n in range(8)] == [
        Stage.WARMUP,
        Stage.TIMED,
        Stage.TIMED,
        Stage.COUNTED,
        Stage.LEAD_IN,
        Stage.TRACED,
        Stage.TRACED,
        Stage.DONE,
    ]
    assert effort.steps == 7
    beside = Effort(warmup=0, timed=1, issued=2, traced=1)
    assert [beside.stage(n) for n in range(4)] == [
        Stage.TIMED,
        Stage.ISSUED,
        Stage.ISSUED,
        Stage.COUNTED,
    ]
    assert beside.steps == 6
    bare = Effort(memory=False)
    assert Stage.COUNTED not in [bare.stage(n) for n in range(bare.steps)]
    assert bare.stage(bare.steps) is Stage.DONE


@pytest.mark.parametrize("wrong", [{"warmup": -1}, {"timed": 0}, {"traced": 0}])
def test_effort_that_records_nothing_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(UsageError):
        Effort(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("words", "own", "target", "rest"),
    [
        (["a.py", "--warmup", "3"], [], "a.py", ["--warmup", "3"]),
        (["--warmup", "3", "a.py", "x"], ["--warmup", "3"], "a.py", ["x"]),
        (["--warmup=3", "--stop-early", "a.py"], ["--warmup=3", "--stop-early"], "a.py", []),
        (["--no-memory", "a.py", "--", "-h"], ["--no-memory"], "a.py", ["--", "-h"]),
        (["-m", "lab.train", "-m", "x"], ["--module"], "lab.train", ["-m", "x"]),
        (["--page", "p.html", "--", "-odd.py"], ["--page", "p.html"], "-odd.py", []),
        (["--help"], ["--help"], None, []),
    ],
)
def test_words_after_the_script_belong_to_it(
    words: list[str], own: list[str], target: str | None, rest: list[str]
) -> None:
    assert split_words(words, InspectOptions) == (own, target, rest)


@pytest.mark.parametrize(
    ("progress", "child", "expected"),
    [
        (Progress(), False, "without importing torch"),
        (Progress(torch=True), False, "without an optimizer step"),
        (Progress(torch=True), True, "in child processes"),
        (Progress(torch=True, optimizer_steps=3, needed=20), False, "after 3 optimizer steps"),
        (
            Progress(torch=True, failure="OSError: full"),
            False,
            "it was not recorded: OSError: full",
        ),
    ],
)
def test_reason_for_a_missing_page_is_one_line(
    progress: Progress, child: bool, expected: str
) -> None:
    output = why_nothing(progress, "train.py", 256, child, "let it run more steps")
    assert output.startswith("train.py ended with exit code 1")
    assert "stepscope.Scope" not in output, "a failure has another reason than unmarked steps"
    assert output.endswith("(let it run more steps)") == (progress.optimizer_steps > 0)
    assert expected in output


def test_module_is_noticed_when_it_is_imported_and_not_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib.util

    (tmp_path / "late_module.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    seen: list[str] = []
    when_imported("late_module", lambda: seen.append("there"))
    assert importlib.util.find_spec("late_module") is not None
    assert seen == []
    import late_module  # type: ignore[import-not-found]

    assert (late_module.value, seen) == (1, ["there"])
    when_imported("late_module", lambda: seen.append("again"))
    assert seen == ["there", "again"]
    del sys.modules["late_module"]


def test_batch_size_is_known_only_if_all_loaders_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils.data import DataLoader

    from stepscope.advisor.scope import result

    four, eight = (DataLoader([1], size) for size in (4, 8))  # type: ignore[arg-type]
    for living, expected in (([four, 1], 4), ([four, eight], None), (["none"], None)):
        monkeypatch.setattr(result.gc, "get_objects", lambda living=living: living)
        assert result._batch() == expected
