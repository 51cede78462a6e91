"""Upgrades of records of schemas 1 and 2: names become dimensions, JSON notes attachments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sample_records import record
from stepscope.analysis.rehearsal.recording import ReadyTimes
from stepscope.errors import StepscopeError
from stepscope.records.memory import Peaks, Saved
from stepscope.records.schema import SCHEMA_VERSION, decode, encode
from stepscope.studies.autocast.cases import Formats, Operators
from stepscope.studies.step.races import Heat

RESULTS = Path(__file__).resolve().parents[2] / "results"
COMMITTED = sorted(RESULTS.glob("*.jsonl"))
Json = dict[str, Any]


def old(study: str = "benchmark", **parts: Any) -> Json:
    """The JSON of a record of schema 2."""
    raw: Json = json.loads(encode(record(study=study, series=(), ceilings=())))
    raw["lints"] = raw.pop("failed_checks")
    del raw["attachments"]
    return raw | {"version": 2, "quantities": {}, "notes": {}} | parts


def upgraded(raw: Json) -> Any:
    return decode(json.dumps(raw))


def dimensions(one: Any) -> Json:
    """The name and every dimension that is not the default."""
    named = {"variant": one.variant, "phase": one.phase, "rank": one.rank, "size": one.size}
    return {"name": one.name} | {key: value for key, value in named.items() if value}


QUANTITIES: dict[str, dict[str, Json]] = {
    "benchmark": {"flops": {"name": "flops"}, "peak.forward": {"name": "peak.forward"}},
    "advise": {
        "peak.base": {"name": "peak_bytes", "variant": "base"},
        "peak.changed": {"name": "peak_bytes", "variant": "changed"},
        "loss_lost.changed": {"name": "loss_lost", "variant": "changed"},
    },
    "allreduce": {"wrong.1024": {"name": "wrong", "size": 1024}},
    "autocast": {
        "casts": {"name": "casts"},
        "norm_error.bfloat16": {"name": "norm_error", "variant": "bfloat16"},
    },
    "checkpointing": {
        "peak_bytes": {"name": "peak_bytes"},
        "peak.backward": {"name": "peak_bytes", "phase": "backward"},
        "predicted.model built": {"name": "predicted_bytes", "phase": "model built"},
    },
    "compile": {
        "cold_s": {"name": "cold_s"},
        "eager.before_backward": {"name": "before_backward", "variant": "eager"},
        "compiled.peak_bytes": {"name": "peak_bytes", "variant": "compiled"},
    },
    "ddp": {
        "gradient_bytes": {"name": "gradient_bytes"},
        "reductions.bucketed 0.1 MiB": {"name": "reductions", "variant": "bucketed 0.1 MiB"},
    },
    "flash": {
        "flops": {"name": "flops"},
        "flops.forward": {"name": "flops", "phase": "forward"},
        "error.dq": {"name": "error", "variant": "dq"},
        "reference_error.output": {"name": "reference_error", "variant": "output"},
        "last_place.dk": {"name": "last_place", "variant": "dk"},
        "forward.tile_m": {"name": "tile_m", "variant": "forward"},
        "key_value.registers": {"name": "registers", "variant": "key_value"},
        "sm.count": {"name": "count", "variant": "sm"},
        "64x128.spills": {"name": "spills", "variant": "64x128"},
    },
    "fsdp": {
        "FSDP.state.rank1": {"name": "state", "variant": "FSDP", "rank": 1},
        "torch fully_shard.sent.rank0": {"name": "sent", "variant": "torch fully_shard"},
    },
    "levers": {
        "work": {"name": "work"},
        "moved.slow": {"name": "moved", "variant": "slow"},
        "kept.fast": {"name": "kept", "variant": "fast"},
    },
    "memory": {
        "peak.loss": {"name": "peak_bytes", "phase": "loss"},
        "predicted.optimizer": {"name": "predicted_bytes", "phase": "optimizer"},
        "largest_bytes": {"name": "largest_bytes"},
    },
    "sharding": {
        "broadcast.gradients.rank2": {"name": "gradients", "variant": "broadcast", "rank": 2},
        "scatter.after step.driver.rank1": {
            "name": "driver",
            "variant": "scatter",
            "phase": "after step",
            "rank": 1,
        },
        "unsharded.peak.allocated.rank0": {
            "name": "allocated",
            "variant": "unsharded",
            "phase": "peak",
        },
    },
    "step": {
        "entropy": {"name": "entropy"},
        "ours.joules": {"name": "joules", "variant": "stepscope"},
        "narrow.sm_clock_mhz": {"name": "sm_clock_mhz", "variant": "low-precision"},
    },
}

SERIES: dict[str, dict[str, Json]] = {
    "benchmark": {"step": {"name": "step"}, "forward": {"name": "forward"}},
    "advise": {
        "base": {"name": "step", "variant": "base"},
        "loss.changed": {"name": "loss", "variant": "changed"},
    },
    "allreduce": {"4194304": {"name": "collective", "size": 4194304}},
    "compile": {
        "eager.step": {"name": "step", "variant": "eager"},
        "compiled.backward": {"name": "backward", "variant": "compiled"},
        "first": {"name": "first"},
    },
    "ddp": {
        "no communication.step": {"name": "step", "variant": "no communication"},
        "bucketed 0.1 MiB.waited": {"name": "waited", "variant": "bucketed 0.1 MiB"},
    },
    "flash": {
        "both": {"name": "both"},
        "forward": {"name": "forward"},
        "sdpa_cudnn": {"name": "step", "variant": "sdpa_cudnn"},
        "sdpa_cudnn.wall": {"name": "wall", "variant": "sdpa_cudnn"},
        "64x128": {"name": "step", "variant": "64x128"},
    },
    "fsdp": {"torch fully_shard.step": {"name": "step", "variant": "torch fully_shard"}},
    "inspect": {
        "issue.forward": {"name": "issue", "phase": "forward"},
        "issue": {"name": "issue"},
    },
    "levers": {"slow": {"name": "step", "variant": "slow"}},
    "parallel-against-torch": {
        "ours.step": {"name": "step", "variant": "stepscope"},
        "theirs.cpu": {"name": "cpu", "variant": "baseline"},
    },
    "rehearsal": {
        "step": {"name": "step"},
        "step.bucketed 2 MiB": {"name": "step", "variant": "bucketed 2 MiB"},
        "alone.4096": {"name": "alone", "size": 4096},
        "burst.4096.8": {"name": "burst", "variant": "8", "size": 4096},
        "agree": {"name": "agree"},
    },
    "sharding": {"torch ZeRO.optimizer": {"name": "optimizer", "variant": "torch ZeRO"}},
    "step": {
        "step": {"name": "step"},
        "ours: eager auto": {"name": "step", "variant": "stepscope: eager auto"},
        "peer: block.consecutive": {"name": "consecutive", "variant": "baseline: block"},
        "loss": {"name": "loss"},
    },
}


@pytest.mark.parametrize("study", QUANTITIES)
def test_names_of_quantities_become_dimensions(study: str) -> None:
    names = QUANTITIES[study]
    quantities = {name: {"value": index, "unit": "B"} for index, name in enumerate(names)}
    decoded = upgraded(old(study, quantities=quantities))
    assert [dimensions(one) for one in decoded.quantities] == list(names.values())
    assert [(one.value, one.unit) for one in decoded.quantities] == [
        (index, "B") for index in range(len(names))
    ]
    for index, wanted in enumerate(names.values()):
        assert decoded.quantity(**wanted) == index


@pytest.mark.parametrize("study", SERIES)
def test_names_of_series_become_dimensions(study: str) -> None:
    names = SERIES[study]
    series = [
        {"name": name, "unit": "ms", "values": [index, 1], "clock": "device", "rank": 3}
        for index, name in enumerate(names)
    ]
    decoded = upgraded(old(study, series=series))
    assert [dimensions(one) for one in decoded.series] == [
        wanted | {"rank": 3} for wanted in names.values()
    ]
    for index, wanted in enumerate(names.values()):
        match = decoded.find(**wanted)
        assert match is not None
        assert match.values == (index, 1)
        assert match.clock == "device"


PEAK = {"phase": "loss", "allocated": 7, "lines": {"parameters": 4}, "operator": "aten.mm"}
SAVED = {
    "module": "head",
    "operator": "mm",
    "shape": [2, 3],
    "dtype": "float32",
    "bytes": 24,
    "code": "a.py:1",
}
READY = {
    "name": "w",
    "elements": 4,
    "element_bytes": 4,
    "kind": "torch.float32 cpu",
    "ready_ms": [1.0, 2.0],
}
OPERATOR = {"operator": "mm", "inputs": ["float16"], "output": ["float16"], "count": 2}


def test_json_notes_become_typed_attachments() -> None:
    notes = {
        "ledger": json.dumps([PEAK]),
        "saved": json.dumps([SAVED]),
        "recording": json.dumps([READY]),
        "formats": json.dumps({"logits": "float16"}),
        "forward": json.dumps([OPERATOR]),
        "largest": "aten.bmm at reference.py:31",
        "backend": "gloo",
    }
    decoded = upgraded(old("memory", notes=notes))
    (peak,) = decoded.required("ledger", Peaks)
    assert (peak.phase, peak.allocated, peak.unattributed) == ("loss", 7, 3)
    (saved,) = decoded.required("saved", Saved)
    assert (saved.shape, saved.bytes) == ((2, 3), 24)
    (ready,) = decoded.required("recording", tuple[ReadyTimes, ...])
    assert ready.ready_ms == (1.0, 2.0)
    assert decoded.required("formats", Formats) == {"logits": "float16"}
    (operator,) = decoded.required("forward", Operators)
    assert operator.count == 2
    assert decoded.notes == {"largest": "aten.bmm at reference.py:31", "backend": "gloo"}


def test_notes_with_a_prefix_are_collected_by_their_suffix() -> None:
    heat = {"ms": 4.0, "first_s": 10.0, "peak_bytes": 5.0}
    notes = {
        "best.ours": "ours: eager auto",
        "best.peer": "peer: block",
        "heat.ours: eager auto": json.dumps(heat),
        "out.peer: model": "failed: RuntimeError",
        "no_turns.peer": "MemoryError",
        "kernels.forward": "forward_kernel; [x]",
        "refused.torch ZeRO": "no such collective",
        "format.slow": "float32",
        "card.name": "NVIDIA H200",
        "64x128": "does not fit",
        "chosen": "does not compile",
        "break.1": "2x print",
        "break.2": "1x item",
        "recompiled.1": "size mismatch",
    }
    decoded = upgraded(old("step", notes=notes))
    assert decoded.notes == {}
    assert decoded.attachments.keys() == {
        "best",
        "heats",
        "excluded",
        "no_run_off",
        "kernels",
        "refused",
        "dtypes",
        "card",
        "breaks",
        "recompiled",
    }
    assert decoded.attachments["best"] == {
        "stepscope": "stepscope: eager auto",
        "baseline": "baseline: block",
    }
    (of_ours,) = decoded.required("heats", dict[str, Heat]).values()
    assert (of_ours.ms, of_ours.peak_bytes) == (4.0, 5.0)
    assert decoded.attachments["excluded"] == {"baseline: model": "failed: RuntimeError"}
    assert decoded.attachments["no_run_off"] == {"baseline": "MemoryError"}
    assert decoded.attachments["kernels"] == {"forward": "forward_kernel; [x]"}
    assert decoded.attachments["refused"] == {
        "torch ZeRO": "no such collective",
        "64x128": "does not fit",
        "chosen": "does not compile",
    }
    assert decoded.attachments["dtypes"] == {"slow": "float32"}
    assert decoded.attachments["card"] == {"name": "NVIDIA H200"}
    assert decoded.attachments["breaks"] == ["2x print", "1x item"]
    assert decoded.attachments["recompiled"] == ["size mismatch"]


@pytest.mark.parametrize("text", ['"quoted" by the library', '["x"]', "{}", "3", "null"])
def test_text_that_looks_like_json_stays_text(text: str) -> None:
    decoded = upgraded(old("flash", notes={"out.flex": text, "kernels.flex": text}))
    assert decoded.required("excluded", dict[str, str]) == {"flex": text}
    assert decoded.required("kernels", dict[str, str]) == {"flex": text}


@pytest.mark.parametrize(
    "text", ["", "{", "not JSON", "[" * 100_000, '[{"phase": 1}]', '{"a": 1}', "null", "7"]
)
def test_a_damaged_json_note_is_reported_when_it_is_read(text: str) -> None:
    decoded = upgraded(old("memory", notes={"ledger": text}))
    with pytest.raises(
        StepscopeError, match=r"attachment 'ledger' of record .* is invalid"
    ) as error:
        decoded.required("ledger", Peaks)
    assert "\n" not in str(error.value)
    assert decode(encode(decoded)) == decoded


@pytest.mark.parametrize(
    ("study", "parts"),
    [
        ("benchmark", {"quantities": [1]}),
        ("benchmark", {"quantities": [{"value": 1, "unit": "B"}]}),
        ("benchmark", {"quantities": "flops"}),
        ("benchmark", {"quantities": 7}),
        ("benchmark", {"quantities": {"flops": 7}}),
        ("benchmark", {"quantities": {"flops": {"value": "7", "unit": "B"}}}),
        ("benchmark", {"quantities": {"flops": {"name": 3, "value": 7, "unit": "B"}}}),
        ("benchmark", {"quantities": {"flops": {"value": 7, "unit": "B", "novel": 1}}}),
        ("allreduce", {"quantities": {"wrong.9999999999999999999": {"value": 0, "unit": "1"}}}),
        ("sharding", {"quantities": {"a.b.rank9999999999999999999": {"value": 0, "unit": "B"}}}),
        ("benchmark", {"series": 7}),
        ("benchmark", {"series": {"step": []}}),
        ("benchmark", {"series": [7]}),
        ("step", {"series": [{"unit": "ms", "values": [1]}]}),
        ("step", {"series": [{"name": 7, "unit": "ms", "values": [1]}]}),
        ("step", {"series": [{"name": ["ours: x"], "unit": "ms", "values": [1]}]}),
        ("benchmark", {"notes": 7}),
        ("benchmark", {"notes": ["ledger"]}),
        ("benchmark", {"notes": {"trace": 7}}),
        ("benchmark", {"study": 7}),
        ("benchmark", {"study": ["step"], "quantities": {"ours.x": {"value": 1, "unit": "1"}}}),
    ],
)
def test_a_malformed_record_is_refused_in_one_line(study: str, parts: Json) -> None:
    for version in (1, 2):
        with pytest.raises(StepscopeError, match="not a record") as error:
            upgraded(old(study) | parts | {"version": version})
        assert "\n" not in str(error.value)


def test_a_note_of_another_type_is_reported_when_it_is_read() -> None:
    decoded = upgraded(old("memory", notes={"ledger": 7, "out.flex": ["x"], "break.1": {}}))
    for name, kind in (("ledger", Peaks), ("excluded", dict[str, str]), ("breaks", list[str])):
        with pytest.raises(StepscopeError, match="is invalid"):
            decoded.required(name, kind)


def test_a_number_in_a_name_may_have_any_length() -> None:
    """Python refuses to convert those of more than a few thousand digits."""
    long = "9" * 5000
    decoded = upgraded(
        old(
            "allreduce",
            quantities={f"wrong.{long}": {"value": 0, "unit": "elements"}},
            series=[{"name": long, "unit": "ms", "values": [1]}],
        )
    )
    assert (decoded.quantities[0].name, decoded.quantities[0].size) == (f"wrong.{long}", 0)
    assert (decoded.series[0].name, decoded.series[0].size) == (long, 0)


def test_a_deeply_nested_record_is_refused() -> None:
    deep = "[" * 500 + "]" * 500
    with pytest.raises(StepscopeError, match="attachments is nested more than 32 levels deep"):
        upgraded(old("memory", notes={"ledger": deep}))
    text = json.dumps(json.loads(encode(record())) | {"attachments": "A"})
    with pytest.raises(StepscopeError, match="attachments is nested more than 32 levels deep"):
        decode(text.replace('"A"', f'{{"x": {deep}}}'))


def test_a_record_of_version_1_has_no_notes() -> None:
    raw = old(quantities={"flops": {"value": 5, "unit": "FLOP"}}) | {"version": 1}
    del raw["notes"]
    decoded = upgraded(raw)
    assert decoded.version == SCHEMA_VERSION
    assert decoded.quantity("flops") == 5
    assert (decoded.notes, decoded.attachments) == ({}, {})


def test_a_record_of_this_version_is_not_upgraded() -> None:
    raw = json.loads(encode(record(study="ddp", notes={"ledger": "[]", "best.ours": "x"})))
    raw["series"][0]["name"] = "flat.step"
    decoded = upgraded(raw)
    assert decoded.series[0].name == "flat.step"
    assert decoded.notes == {"ledger": "[]", "best.ours": "x"}
    assert decoded.attachments == {}


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_committed_records_upgrade_and_keep_every_value(path: Path) -> None:
    for line in path.read_bytes().splitlines():
        raw = json.loads(line)
        if "run" not in raw:
            continue
        decoded = decode(line)
        written = encode(decoded)
        assert json.loads(written)["version"] == SCHEMA_VERSION
        assert decode(written) == decoded
        assert encode(decode(written)) == written
        before = raw.get("quantities", {})
        values = before.values() if isinstance(before, dict) else before
        assert [one.value for one in decoded.quantities] == [one["value"] for one in values]
        assert [list(one.values) for one in decoded.series] == [
            one["values"] for one in raw["series"]
        ]
        assert len({json.dumps(dimensions(one)) for one in decoded.quantities}) == len(before)
        assert not any("." in one.name for one in (*decoded.quantities, *decoded.series))
