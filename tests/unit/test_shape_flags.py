"""--layers, --d-model, --d-ff, --heads and --vocab: the same overrides in every command."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from parallel_records import ddp_record, sharding_record
from stepscope.cli import main
from stepscope.errors import UsageError
from stepscope.model.config import ModelConfig
from stepscope.records.schema import Record
from stepscope.studies.registry import find_study
from stepscope.training.ranks.subject import make_subject
from view_blocks import findings_of, table_of

GIVEN = {"layers": 1, "d_model": 64, "d_ff": 96, "heads": 2, "vocab": 40}
SHAPE = {"n_layers": 1, "d_model": 64, "d_ff": 96, "n_heads": 2, "vocab": 40}
RANKED = ("ddp", "sharding", "fsdp")
STUDIES = (*RANKED, "step", "benchmark", "profile", "memory", "compile", "checkpointing")


def cases(study: str, **given: Any) -> list[Any]:
    found = find_study(study)
    ranks = {"ranks": (2,)} if study in RANKED else {}
    planned = found.cases(found.flags(size=("tiny",), **ranks, **given))
    return [case for case in planned if getattr(case, "size", None) == "tiny"]


@pytest.mark.parametrize("study", STUDIES)
def test_a_study_measures_the_overridden_shape(study: str) -> None:
    overridden = cases(study, **GIVEN)
    assert overridden
    for case in overridden:
        shape = case.shape
        assert shape == ModelConfig(**SHAPE, context=shape.context)


@pytest.mark.parametrize("study", STUDIES)
@pytest.mark.parametrize("flag", GIVEN)
def test_an_overridden_size_is_another_case(study: str, flag: str) -> None:
    plain = {case.key for case in cases(study)}
    changed = {case.key for case in cases(study, **{flag: GIVEN[flag]})}
    assert changed
    assert not plain & changed


@pytest.mark.parametrize("study", RANKED)
def test_a_case_survives_its_record(study: str) -> None:
    kind = find_study(study).case
    for case in (*cases(study), *cases(study, **GIVEN)):
        config = msgspec.to_builtins(case)
        assert msgspec.convert(config, kind).key == case.key
        # Records of named sizes are as before.
        assert ("overrides" in config) == bool(case.overrides)


@pytest.mark.parametrize(
    ("record", "table"), [(ddp_record(), "ddp-steps"), (sharding_record(), "sharding-ways")]
)
def test_pages_name_the_overrides(record: Record, table: str) -> None:
    config = record.config | {"overrides": {"n_layers": 1, "vocab": 40}}
    study = find_study(record.study)
    case = msgspec.convert(config, study.case).key
    changed = msgspec.structs.replace(record, case=case, config=config)
    blocks = study.view([record, changed])
    names = [row[0] for row in table_of(blocks, table).rows]
    assert {"small", "small (n_layers=1, vocab=40)"} <= set(names)
    texts = [finding.text for finding in findings_of(blocks)]
    assert any("small (n_layers=1, vocab=40)" in text for text in texts)


def test_ranks_train_the_overridden_model() -> None:
    (case,) = cases("sharding", **GIVEN)
    model, share_of = make_subject(SimpleNamespace(device="cpu"), case, 2)  # type: ignore[arg-type]
    assert share_of(0).loss_of(model).isfinite()
    assert sum(p.numel() for p in model.parameters()) == 2 * 40 * 64 + 4 * 64**2 + 3 * 64 * 96 + 192


@pytest.mark.parametrize("study", RANKED)
def test_a_model_of_the_user_has_its_own_shape(study: str) -> None:
    found = find_study(study)
    flags = found.flags(model="own_models:build", ranks=(2,), layers=1)
    with pytest.raises(UsageError, match="defines its own shape"):
        found.cases(flags)


def test_predict_takes_the_overrides(capsys: pytest.CaptureFixture[str]) -> None:
    medium = ["--layers", "24", "--d-model", "1024", "--d-ff", "4096", "--heads", "16"]
    peaks = []
    for words in (["--size", "small", *medium], ["--size", "medium"], ["--size", "small"]):
        assert main(["predict", *words, "--context", "128", "--json"]) == 0
        (fact,) = json.loads(capsys.readouterr().out)["predictions"]
        peaks.append(fact["peak_bytes"])
    assert peaks[0] == peaks[1] > peaks[2]
    assert main(["predict", "--size", "tiny", "--context", "16", "--layers", "1"]) == 0
    assert "tiny (n_layers=1)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("predict --size tiny --heads 3", "tiny (n_heads=3): n_heads 3 does not divide"),
        ("predict --size tiny --layers 0", "tiny (n_layers=0): n_layers is 0"),
        ("run ddp --size tiny --ranks 2 --heads 3", "tiny (n_heads=3): n_heads 3"),
    ],
)
def test_an_invalid_shape_is_an_error(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.split()) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.strip().splitlines()) == 1
