"""A user's model: building, measuring and error messages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from command_line import CommandLine
from own_models import causal_lm_flops, conv_net_flops
from own_records import own_record
from quiet_bench import QuietBench
from stepscope.advisor.advise.cases import Trial
from stepscope.errors import UsageError
from stepscope.records.jsonl import read_records
from stepscope.report.blocks import Table
from stepscope.studies.own import STUDY
from stepscope.studies.own.cases import OwnFlags
from stepscope.views.program.cases import InspectedCase
from view_blocks import findings_of, table_of

RESULTS = Path(__file__).parents[2] / "results"


def measured(name: str, **changes: Any) -> Any:
    flags = OwnFlags(model=f"own_models:{name}", batch=(2,), warmup=1, steps=2, traced=1, **changes)
    (case,) = STUDY.cases(flags)
    return STUDY.measure(case, QuietBench())


@pytest.mark.parametrize(
    ("name", "flops", "part"),
    [
        ("causal_lm", causal_lm_flops(2), "layers.*/qkv_proj"),
        ("conv_net", conv_net_flops(2), "second"),
        ("vision_transformer", None, "encoder/layers.*"),
    ],
)
def test_third_party_models_are_measured(name: str, flops: int | None, part: str) -> None:
    result = measured(name)
    (counted,) = (one.value for one in result.quantities if one.name == "flops")
    assert counted == flops or flops is None
    assert {s.name for s in result.series} >= {"step", "forward", "backward", "optimizer", "traced"}
    uses = result.attachments["profile"].uses
    assert any(use.module.startswith(part) for use in uses)
    phases = [peak.phase for peak in result.attachments["ledger"]]
    assert phases == ["forward", "backward", "optimizer"]


@pytest.mark.parametrize("changes", [{"dtype": ("bfloat16",)}, {"optimizer": ("adamw-loop",)}])
def test_a_setting_applies(changes: dict[str, tuple[str, ...]]) -> None:
    result = measured("causal_lm", **changes)
    uses = result.attachments["profile"].uses
    kernels = {use.kernel for use in uses if use.phase == "optimizer"}
    if "optimizer" in changes:
        assert not any("_foreach" in kernel for kernel in kernels)
    else:
        assert any(tensor.dtype == "bfloat16" for tensor in result.attachments["saved"])


@pytest.mark.parametrize("checkpoint", ["as-is", "blocks"])
def test_fused_attention_replaces_what_is_naive(checkpoint: str) -> None:
    results = [
        measured("naive_lm", attention=(one,), checkpoint=(checkpoint,))
        for one in ("as-is", "fused")
    ]
    naive, fused = ({use.kernel for use in one.attachments["profile"].uses} for one in results)
    flash = "aten::_scaled_dot_product_flash_attention_for_cpu"
    assert flash not in naive
    assert flash in fused
    assert "aten::_softmax" not in fused
    assert "fused attention" in results[1].notes["memory_missing"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("returns_nothing", "returned nothing"),
        ("returns_numbers", "the model returned by own_models:returns_numbers is a int"),
        ("no_batch", "the make_batch returned by own_models:no_batch is nothing"),
        ("nothing_to_train", "has no trainable parameters"),
        ("no_loss", r"a tensor of shape \(2, 10\), which is not a loss"),
        ("inputs_and_targets", "a batch of 2 elements is passed as 2 arguments"),
        ("not_a_function", "it must be a function"),
        ("missing", "own_models has no missing"),
    ],
)
def test_invalid_build_functions_are_rejected(name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        measured(name)


def test_a_build_function_that_raises_is_rejected_before_measuring(tmp_path: Any) -> None:
    command = CommandLine(tmp_path)
    done = command("run", "own", "--model", "own_models:raises", "--device", "cpu", "--no-report")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "stepscope: own_models:raises failed: RuntimeError: planned\n"
    assert command.records() == ()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({}, "no model was given"),
        ({"model": "a/b.py"}, "not of the form"),
        ({"model": "a:b", "compile": ("all",)}, "compile 'all' does not exist"),
        ({"model": "a:b", "optimizer": ("adam",)}, "optimizer 'adam' does not exist"),
        ({"model": "a:b", "dtype": ("int8",)}, "int8"),
        ({"model": "a:b", "dtype": ("bf16-stream",)}, "its own residual stream"),
        ({"model": "a:b", "dtype": ("bf16-master",)}, "no master weights"),
    ],
)
def test_flags_are_checked_before_running(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        STUDY.cases(OwnFlags(**flags))


def test_settings_are_compared_with_the_first_case() -> None:
    records = [
        own_record(100.0, id="first"),
        own_record(25.0, 1 << 30, setting={"dtype": "bfloat16"}, id="dtype"),
        own_record(150.0, setting={"batch": 16}, id="batch"),
        own_record(10.0, setting={"dtype": "bfloat16", "optimizer": "adamw-fused"}),
    ]
    blocks = STUDY.view(records)
    dtype, batch = findings_of(blocks, "own.setting")
    assert dtype.text == (
        "With dtype bfloat16 instead of float32 a step takes 25.0 ms instead of 100 ms: 4.00×"
        " [3.96, 4.04] the speed, and the peak memory goes from 2.00 GiB to 1.00 GiB."
    )
    assert dtype.values == {
        "setting": "dtype",
        "value": "bfloat16",
        "base_value": "float32",
        "step_ms": 25.0,
        "base_ms": 100.0,
        "speedup": 4.0,
        "peak_bytes": 1 << 30,
        "base_peak_bytes": 2 << 30,
    }
    assert (dtype.tone, dtype.records) == ("good", ("first", "dtype"))
    assert batch.values["speedup"] == pytest.approx(4 / 3)
    assert "1.33× [1.32, 1.35] the speed per sample" in batch.text
    assert batch.records == ("first", "batch")
    table = table_of(blocks, "own-settings")
    assert [row[2] for row in table.rows] == ["float32", "bfloat16", "float32", "bfloat16"]
    assert table.columns[5].title == "step"


def test_the_settings_table_shows_what_differs() -> None:
    records = [own_record(100.0), own_record(130.0, setting={"checkpoint": "blocks"})]
    table = table_of(STUDY.view(records), "own-settings")
    assert table.columns[5].title == "checkpoint"
    assert [row[5] for row in table.rows] == ["as-is", "blocks"]
    assert all(len(row) == len(table.columns) for row in table.rows)


def test_a_failed_case_has_a_row_with_its_settings() -> None:
    failed = own_record(setting={"batch": 64}, status="oom", reason="too large")
    table = STUDY.headline([own_record(100.0), failed])
    assert table is not None
    assert table.rows[1] == (
        "lab:build",
        64,
        "float32",
        "no",
        "adamw",
        "OOM",
        *[None] * 7,
    )
    *_, listed = STUDY.view([own_record(100.0), failed])
    assert isinstance(listed, Table)
    assert (listed.name, listed.rows) == ("own-lost", ((failed.case, "oom", "too large"),))


def test_an_old_record_without_the_newest_settings_is_shown() -> None:
    record = own_record(100.0)
    old = {k: v for k, v in record.config.items() if k not in ("attention", "checkpoint")}
    table = STUDY.headline([msgspec.structs.replace(record, config=old)])
    assert table is not None
    assert table.rows[0][:5] == ("lab:build", 8, "float32", "no", "adamw")


@pytest.mark.parametrize("path", sorted(RESULTS.glob("advise-*.jsonl")), ids=lambda path: path.stem)
def test_a_recorded_case_decodes_to_its_config(path: Path) -> None:
    kinds = {"inspect": InspectedCase, "advise": Trial}
    for record in read_records(path):
        case = msgspec.convert(record.config, kinds[record.study])
        # Ranges were added to advice after some of these records, and fields with defaults.
        recorded = {name: x for name, x in record.config.items() if name != "advice"}
        assert (
            _fields_of(msgspec.json.decode(msgspec.json.encode(case.config)), recorded) == recorded
        )
        assert case.key == record.case


def _fields_of(config: Any, recorded: Any) -> Any:
    """Return the fields of a configuration that a record has."""
    if not isinstance(recorded, dict) or config is None:
        return config
    return {name: _fields_of(config[name], x) for name, x in recorded.items()}
