"""Rules that lack an input, and ceilings measured for records of this machine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import msgspec
import pytest
from test_advice_rules import facts

from sample_records import environment
from stepscope.analysis.advice.missing_inputs import BANDWIDTH, MEMORY, RATES, not_evaluated
from stepscope.cli import main
from stepscope.cli.commands import advise as advise_command
from stepscope.records.jsonl import read_records, write_records
from stepscope.records.schema import Ceiling, Environment, Record

RESULTS = Path(__file__).parents[2] / "results"


def left_out(**changes: Any) -> dict[str, str]:
    return {one.code: one.missing for one in not_evaluated(facts(**changes))}


def test_with_all_inputs_every_rule_is_evaluated() -> None:
    assert left_out(dtype="float32", fused_optimizer=False) == {}


def test_rules_that_lack_an_input_are_named_with_it() -> None:
    unknown = {"rates": {}, "bandwidth": None}
    assert left_out(dtype="float32", fused_optimizer=False, **unknown) == {
        "tf32": RATES,
        "bfloat16": RATES,
        "fused-optimizer": BANDWIDTH,
    }
    assert left_out(**unknown) == {}, "bfloat16 and fused already"
    emulated = left_out(on_gpu=False, autocast=True, **unknown)
    assert emulated == {"float32": RATES}
    assert "bfloat16" not in left_out(dtype="float32", rates={}, lacks=("bfloat16",))
    without_ledger = left_out(memory_bytes=80 << 30, peak_bytes=20 << 30)
    assert without_ledger == {"checkpoint": MEMORY}


class Here:
    """Stands for a runner on this machine."""

    lacks: ClassVar[dict[str, str]] = {"compiler": "install g++"}
    environment: ClassVar[Environment]
    requested: ClassVar[list[str]] = []

    def __init__(self, device: str, _: float) -> None:
        self.requested.append(device)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def ceilings(self, observer: Any) -> tuple[Ceiling, ...]:
        observer.calibrating(None)
        known = {"matmul.float32": 7e10, "memory.copy": 6e10, "launch.rate": 1e5}
        return tuple(
            Ceiling(name=name, value=value, unit="1/s", source="measured")
            for name, value in known.items()
        )


def without_ceilings() -> Record:
    (record, *_) = read_records(RESULTS / "advise-slow_cpu.jsonl")
    attachments = {name: one for name, one in record.attachments.items() if name != "advice"}
    return msgspec.structs.replace(record, ceilings=(), attachments=attachments)


@pytest.fixture
def advise_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Any:
    def run(where: Environment, *words: str) -> tuple[str, str, str]:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setattr(advise_command, "Runner", Here)
        Here.environment, Here.requested = where, []
        file = tmp_path / "train.jsonl"
        write_records([without_ceilings()], file)
        assert main(["advise", str(file), "--out", str(tmp_path), *words]) == 0
        captured = capsys.readouterr()
        return captured.out, captured.err, (tmp_path / "train-advice.html").read_text()

    return run


def codes(listed: Sequence[dict[str, Any]]) -> set[str]:
    return {one["code"] for one in listed}


def test_records_of_this_machine_get_its_ceilings(advise_output: Any) -> None:
    out, err, page = advise_output(without_ceilings().environment, "--json")
    output = json.loads(out)
    assert "fused-optimizer" in codes(output["advice"])
    assert "compile" not in codes(output["advice"]), "there is no compiler"
    assert "fused-optimizer" not in codes(output["not_evaluated"])
    assert "measuring this machine's ceilings" in err
    assert Here.requested == ["cpu"]
    assert "Not evaluated: fused optimizer" not in page


def test_records_of_another_machine_say_what_could_not_be_evaluated(advise_output: Any) -> None:
    out, err, page = advise_output(environment(), "--json")
    output = json.loads(out)
    assert "fused-optimizer" not in codes(output["advice"])
    rule = {"code": "fused-optimizer", "title": "fused optimizer", "missing": BANDWIDTH}
    assert rule in output["not_evaluated"]
    assert "measuring" not in err
    for text in (page, advise_output(environment(), "--full")[0]):
        plain = " ".join(text.split())
        assert "Not evaluated: fused optimizer. The records have no memory" in plain
        assert "stepscope advise SCRIPT" in plain
