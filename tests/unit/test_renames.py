"""Upgrades of records of schema 3: names that became those of the field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sample_records import record, run
from stepscope.records.jsonl import read_records
from stepscope.records.renames import with_former_names
from stepscope.records.schema import FailedCheck, Record, decode, encode
from stepscope.records.store import Store
from stepscope.studies.base import Study
from stepscope.studies.registry import viewables

Json = dict[str, Any]
RESULTS = Path(__file__).resolve().parents[2] / "results"


def upgraded(**parts: Any) -> Record:
    """Decode a record of schema 3 with these parts."""
    raw: Json = json.loads(encode(record())) | {"version": 3}
    raw["lints"] = raw.pop("failed_checks")
    return decode(json.dumps(raw | parts))


def test_lints_become_failed_checks() -> None:
    busy = FailedCheck(code="busy-machine", message="threads waited for a core")
    assert upgraded(lints=[msgspec.to_builtins(busy)]).failed_checks == (busy,)


LINES = {
    ("", "residual"): "unattributed",
    ("idle", "host: nothing was launched"): "CPU: nothing was launched",
    ("idle", "synchronisation: the host waits"): "synchronization: the CPU waits for the GPU",
    ("forward", "matmul"): "matmul",
}
BAR = {"start": 0.0, "end": 1.0, "label": "host", "group": "host"}


def test_lines_and_rows_of_a_trace_have_new_names() -> None:
    profile = {
        "lines": [{"phase": phase, "kind": kind, "ms": 1.0} for phase, kind in LINES],
        "timeline": [
            {"label": "host", "bars": [BAR | {"label": "host", "group": "forward"}]},
            {"label": "device idle", "bars": [BAR]},
        ],
    }
    upgrade = upgraded(attachments={"profile": profile}).attachments["profile"]
    assert [line["kind"] for line in upgrade["lines"]] == list(LINES.values())
    cpu, idle = upgrade["timeline"]
    assert (cpu["label"], cpu["bars"][0]["label"]) == ("CPU", "host")
    assert (idle["bars"][0]["label"], idle["bars"][0]["group"]) == ("CPU", "CPU")


@pytest.mark.parametrize(
    "part",
    [
        {"profile": 7},
        {"profile": {"lines": 7, "timeline": [7, {"label": "device idle", "bars": [7]}]}},
        {"profile": {"lines": [7, {"kind": ["residual"]}], "timeline": None}},
    ],
)
def test_malformed_attachments_are_unchanged(part: Json) -> None:
    assert upgraded(attachments=part).attachments == part


VARIANTS = {
    "ours": "stepscope",
    "peer: block default checkpointed": "baseline: block default checkpointed",
    "ours: eager auto joined searched keeps gates updates in backward graph": (
        "stepscope: eager auto fused projections autotuned GEMMs saves gates"
        " optimizer-in-backward graph"
    ),
    "narrow: eager auto joined narrow stream narrow updates in backward graph": (
        "low-precision: eager auto fused projections low-precision stream"
        " low-precision optimizer-in-backward graph"
    ),
    "spare": "low-memory",
    "": "",
}


@pytest.mark.parametrize(("former", "name"), VARIANTS.items())
def test_sides_of_a_comparison_have_new_names(former: str, name: str) -> None:
    series = [{"name": "step", "unit": "ms", "values": [1], "variant": former}]
    attachments = {"best": {former: former}, "heats": {former: {"ms": 1.0}}, "excluded": 7}
    config = {"kind": "race", "race": "xl-512", "racers": [[former, {}], 7]}
    upgrade = upgraded(study="step", series=series, attachments=attachments, config=config)
    assert upgrade.series[0].variant == name
    assert upgrade.attachments == {
        "best": {name: name},
        "heats": {name: {"ms": 1.0}},
        "excluded": 7,
    }
    assert upgrade.config["racers"] == [[name, {}], 7]
    plain = upgraded(study="ddp", series=series, attachments=attachments)
    assert (plain.series[0].variant, plain.attachments) == (former, attachments)


def test_settings_have_new_names() -> None:
    former = {"joined": True, "keep": "gates", "searched": False, "size": "small"}
    names = {"fused_projections": True, "activation_policy": "gates", "autotune_gemms": False}
    step = former | {"optimizer": "stepscope-as-made"}
    upgrade = upgraded(
        study="step",
        config=former | {"rung": "joined", "racers": [["ours", step]]},
        case="so-far-joined_small_c8_adamw=stepscope-as-made_fused_joined_searched_keep=gates_b1",
    )
    grads = {"optimizer": "stepscope-low-precision-grads"}
    assert upgrade.config == {
        **names,
        "size": "small",
        "rung": "fused-projections",
        "racers": [["ours", names | {"size": "small"} | grads]],
    }
    assert upgrade.case == (
        "so-far-fused-projections_small_c8_adamw=stepscope-low-precision-grads_fused"
        "_fused-projections_autotune-gemms_activation-policy=gates_b1"
    )


def test_stored_advice_uses_todays_words() -> None:
    former = {
        "code": "tf32",
        "title": "float32 products on tensor cores (TF32)",
        "why": "products take 204 ms in float32; TF32 is 8.54× as fast here",
        "setting": {"dtype": "tf32"},
    }
    upgrade = upgraded(attachments={"advice": [former, 7]}, config={"advice": [former]})
    (first, other), (again,) = upgrade.attachments["advice"], upgrade.config["advice"]
    assert (other, again) == (7, first)
    assert first == former | {
        "title": "TF32 matmuls (tensor cores for float32)",
        "why": "matmuls take 204 ms in float32; TF32 is 8.54× as fast here",
    }


def test_a_study_has_a_new_name(tmp_path: Path) -> None:
    upgrade = upgraded(study="levers", config={"lever": "tiling"})
    assert (upgrade.study, upgrade.config) == ("techniques", {"technique": "tiling"})
    with Store(tmp_path / "records.db") as store:
        store.add_run(run())
        store.add(upgrade)
        store._connection.execute("UPDATE records SET study = 'levers'")
        assert store.records(study="techniques") == (upgrade,)


def test_json_has_the_former_names_too() -> None:
    busy = FailedCheck(code="busy-machine", message="planted")
    config = {"fused_projections": True, "batch": 4}
    raw = with_former_names(msgspec.to_builtins(record(failed_checks=(busy,), config=config)))
    assert raw["lints"] == raw["failed_checks"] != ()
    assert raw["config"].items() >= (config | {"joined": True}).items()


def test_upgraded_cases_have_the_key_of_their_settings() -> None:
    """A run of today is compared with an older one by this key."""
    records = [*read_records(RESULTS / "step_h200.jsonl"), *read_records(RESULTS / "h200.jsonl")]
    for one in records:
        study = viewables()[one.study]
        # The oldest comparisons do not store what selected their variants.
        stored = one.config.get("kind") != "race" or "forms" in one.config
        if isinstance(study, Study) and stored:
            (result,) = study.results([one])
            assert result.case.key == one.case
