"""The techniques study: correctness of both variants, the device card, and report blocks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from command_line import CommandLine
from quiet_bench import QuietBench
from sample_records import quantity_of, value_of
from stepscope.analysis.waterfall import CAUSES
from stepscope.errors import UsageError
from stepscope.measure.device_properties import cpu_properties, cuda_properties
from stepscope.measure.techniques import on_cpu, pair
from stepscope.records.schema import Ceiling, Record
from stepscope.report.blocks import Table
from stepscope.studies.base import CaseSkipped
from stepscope.studies.registry import find_study
from stepscope.studies.techniques.cases import NAMES, TechniqueCase, TechniquesFlags
from stepscope.studies.techniques.catalog import TECHNIQUES
from stepscope.studies.techniques.measure import measure_technique
from technique_records import CEILINGS, card_record, technique_record
from view_blocks import figures_of, findings_of, tables_of

CONFIG = {"mib": 1, "rows": 256, "warmup": 0, "rounds": 2}


@pytest.mark.parametrize("technique", TECHNIQUES)
def test_both_variants_on_a_cpu_are_correct_and_timed(technique: str) -> None:
    done = measure_technique(TechniqueCase(technique=technique, **CONFIG), QuietBench())
    assert [(s.name, s.variant) for s in done.series] == [("step", "slow"), ("step", "fast")]
    assert all(len(series.values) == 2 for series in done.series)
    for variant in ("slow", "fast"):
        assert value_of(done.quantities, "error", variant=variant) < 1e-5
        assert value_of(done.quantities, "moved", variant=variant) > 0
    assert quantity_of(done.quantities, "work").unit in ("B", "FLOP")


def test_traffic_and_flops_of_both_variants() -> None:
    pairs = {name: make(1 << 18, 256) for name, make in on_cpu.PAIRS.items()}
    ratio = {name: p.slow.moved / p.fast.moved for name, p in pairs.items()}
    # A line of 64 bytes and a written word, against a word and a written word.
    assert ratio["coalescing"] == (64 + 4) / (4 + 4)
    assert ratio["fusion"] == 4.5
    assert ratio["recomputation"] == 11 / 5
    assert ratio["tiling"] == (256 + 2) / (256 / on_cpu.ROWS + 2)
    assert pairs["precision"].slow.flops == 2 * pairs["precision"].fast.flops
    saved = pairs["recomputation"].slow.kept, pairs["recomputation"].fast.kept
    assert saved == (4 * 4 * 2.0**18, 4 * 2.0**18)


def test_a_wrong_variant_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(elements: int, rows: int) -> pair.Pair:
        correct = on_cpu.coalescing(elements, rows)
        wrong = correct.fast._replace(result=lambda: correct.truth() + 0.5)
        return correct._replace(fast=wrong)

    monkeypatch.setattr(on_cpu, "PAIRS", {"coalescing": broken})
    with pytest.raises(RuntimeError, match="the fast variant is wrong: its error is"):
        measure_technique(TechniqueCase(technique="coalescing", **CONFIG), QuietBench())


def test_the_error_of_a_non_finite_result_is_infinite() -> None:
    assert pair.error(torch.tensor([float("nan"), 1.0]), torch.ones(2).double()) == float("inf")
    assert pair.error(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0]).double()) == 0.5


def test_without_triton_techniques_are_skipped_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    bench: Any = SimpleNamespace(device=SimpleNamespace(kind="cuda"))
    with pytest.raises(CaseSkipped, match="Triton is not installed"):
        measure_technique(TechniqueCase(technique="fusion", **CONFIG), bench)


@pytest.mark.parametrize(
    "fields",
    [
        {"technique": ("luck",)},
        {"mib": -1},
        {"mib": 10**6},
        {"rows": 100},
        {"rounds": 0},
        {"warmup": -1},
    ],
)
def test_invalid_flags_are_rejected(fields: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        TechniquesFlags(**fields)


def test_keys_contain_the_sizes() -> None:
    keys = [case.key for case in find_study("techniques").cases(TechniquesFlags(mib=8, rows=512))]
    assert keys == ["card", *(f"{name}_m8_r512" for name in NAMES[1:])]


def test_the_card_of_a_gpu_from_driver_attributes() -> None:
    answers = {16: 132, 10: 32, 39: 2048, 82: 65536, 81: 233472, 38: 50 << 20, 37: 6144,
               13: 1_980_000, 36: 3_201_000}  # fmt: skip
    facts = {name: value for name, (value, _) in cuda_properties(answers.get).items()}
    assert facts["sms"] == 132
    assert facts["warps_per_sm"] == 64
    assert facts["clock_hz"] == 1.98e9
    assert facts["memory_rate"] == pytest.approx(2 * 3.201e9 * 6144 / 8)
    assert "blocks_per_sm" not in facts
    assert cuda_properties(lambda _: None) == {}


def fake_system(root: Path, cpuinfo: str) -> Path:
    for index, (level, kind, size) in enumerate(
        (
            ("1", "Data", "48K"),
            ("1", "Instruction", "32K"),
            ("2", "Unified", "2048K"),
            ("3", "Unified", "60M"),
        )
    ):
        folder = root / f"sys/devices/system/cpu/cpu0/cache/index{index}"
        folder.mkdir(parents=True)
        for name, text in (
            ("level", level),
            ("type", kind),
            ("size", size),
            ("coherency_line_size", "64"),
        ):
            (folder / name).write_text(text + "\n")
    (root / "proc").mkdir()
    (root / "proc/cpuinfo").write_text(cpuinfo)
    return root


def test_the_card_of_a_cpu_from_system_files(tmp_path: Path) -> None:
    text = "processor\t: 0\nflags\t\t: sse2 avx2 avx512f amx_tile\ncpu MHz\t\t: 2000.5\n\n"
    facts, words = cpu_properties(fake_system(tmp_path, text + text.replace("avx512f", "")))
    assert {name: value for name, (value, _) in facts.items()} == {
        "l1_bytes": 48 << 10,
        "l2_bytes": 2 << 20,
        "l3_bytes": 60 << 20,
        "line_bytes": 64,
        "clock_hz": 2.0005e9,
        "vector_bits": 512,
    }
    assert words == {"matrix instructions": "amx_tile"}


def test_a_system_without_those_files_has_an_empty_card(tmp_path: Path) -> None:
    assert cpu_properties(tmp_path) == ({}, {})


def viewed(*records: Record) -> tuple[str, dict[str, Table]]:
    blocks = find_study("techniques").view(records)
    text = "\n".join(block.sentence for block in findings_of(blocks))
    return text, tables_of(blocks)


def test_the_report_has_gain_prediction_rates_and_shares() -> None:
    text, tables = viewed(technique_record())
    assert "Coalesced access: 4.00× faster (1.00 ms vs 250 µs); 4.50× predicted" in text
    assert "Memory moves sectors of 32 bytes" in text
    (row,) = tables["techniques"].rows
    assert row[0] == "Coalesced access"
    assert row[3:5] == (pytest.approx(4.0), pytest.approx(4.5))
    assert row[5:7] == ("1.00 TB/s", "4.00 TB/s")
    assert row[7:9] == (pytest.approx(0.25), pytest.approx(1.0))
    assert row[9:] == (1e-7, 1e-7)


def test_each_variant_is_compared_with_the_rate_of_its_dtype() -> None:
    matmul = technique_record(
        "precision",
        slow=4.0,
        fast=0.4,
        work=(140e9, "FLOP"),
        flops=(140e9, 140e9),
        moved=(8e9, 2e9),
        formats=("float32", "bfloat16"),
    )
    _, tables = viewed(matmul)
    (row,) = tables["techniques"].rows
    assert row[4] == pytest.approx(700 / 50)
    assert row[7:9] == (pytest.approx(35 / 50), pytest.approx(350 / 700))


def test_a_technique_without_a_gain_is_reported() -> None:
    slower = technique_record("recomputation", slow=1.0, fast=1.25, kept=(4 << 20, 1 << 20))
    text, _ = viewed(slower, technique_record("fusion", slow=1.0, fast=1.01))
    assert "Recomputation: 1.25× slower" in text
    assert "1.00 MiB instead of 4.00 MiB saved for backward" in text
    assert "Operator fusion: no difference" in text


def test_cached_traffic_has_no_prediction() -> None:
    tiled = technique_record(
        "tiling",
        work=(17e9, "FLOP"),
        flops=(17e9, 17e9),
        moved=(34e9, 1e9),
        formats=("float32", "float32"),
    )
    text, tables = viewed(tiled)
    assert tables["techniques"].rows[0][4] is None
    assert "predicted from FLOPs and memory traffic" not in text


def test_without_ceilings_there_is_no_prediction() -> None:
    text, tables = viewed(technique_record(ceilings=()))
    assert "predicted from FLOPs and memory traffic" not in text
    assert tables["techniques"].rows[0][4] is None


def test_the_card_has_units_and_the_ridge_point() -> None:
    text, tables = viewed(card_record())
    rows = {row[0]: row[1] for row in tables["techniques-card"].rows}
    assert rows["streaming multiprocessors (SMs)"] == "132"
    assert rows["shared memory per SM"] == "228 KiB"
    assert rows["memory bus"] == "6,144 bit"
    assert rows["highest clock"] == "1.98 GHz"
    assert rows["compute capability"] == "9.0"
    assert "12.5 in float32, 175 in bfloat16" in text


def test_emulated_dtypes_have_no_ridge_point() -> None:
    slow = Ceiling(name="matmul.float16", value=1e9, unit="FLOP/s", source="measured")
    text, _ = viewed(card_record(ceilings=(*CEILINGS, slow)))
    assert "float16" not in text.replace("bfloat16", "")


def test_each_technique_names_a_part_of_the_waterfall() -> None:
    for technique in TECHNIQUES.values():
        assert technique.cause in CAUSES
    _, tables = viewed(technique_record())
    assert tables["techniques-hardware"].rows[0][4] == "casts and copies"


def test_a_cpu_has_its_own_descriptions() -> None:
    from sample_records import environment

    text, _ = viewed(technique_record(environment=environment(device_kind="cpu")))
    assert "cache lines" in text
    assert "sectors" not in text


def test_a_failed_technique_is_a_row_with_its_reason() -> None:
    _, tables = viewed(technique_record(status="skipped", reason="Triton is not installed"))
    assert tables["techniques-lost"].rows == (("coalescing", "skipped", "Triton is not installed"),)
    assert "techniques" not in tables


def test_the_figure_shows_measured_and_predicted_gains() -> None:
    blocks = find_study("techniques").view(
        [technique_record(), technique_record("fusion", fast=0.5)]
    )
    (figure,) = figures_of(blocks).values()
    measured, expected = figure.curves
    assert measured.x == ("Operator fusion", "Coalesced access")
    assert measured.y == pytest.approx((2.0, 4.0))
    assert expected.y == pytest.approx((4.5, 4.5))


def test_the_command_prints_the_table(cli: CommandLine) -> None:
    done = cli.line(
        "run techniques --technique card coalescing fusion --mib 1 --rounds 2 --device cpu"
    )
    assert done.returncode == 0, done.stderr
    assert "Coalesced access" in done.stdout
    assert {record.case for record in cli.records()} == {"card", "coalescing_m1", "fusion_m1"}
