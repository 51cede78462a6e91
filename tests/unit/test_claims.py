"""Numbers in prose come from records: marks, the refusal of typed numbers, and the README's claims,
each compared with the records it rests on."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import claims
import hand_written_pages as pages
from claims.records import percents, spread
from step_race import STUDY as STEP
from step_race.races import Heat
from step_race.rows import races

from stepscope.advisor.advise.cases import STUDY_NAME as TRIALS
from stepscope.records.jsonl import read_records
from stepscope.records.schema import Record

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "results"
README = (ROOT / "README.md").read_text()
TEXTS = {name: (ROOT / name).read_text() for name in pages.PAGES}


def lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RESULTS / name).read_text().splitlines()]


def claimed(name: str) -> str:
    return claims.CLAIMS[name](RESULTS)


def table_rows() -> dict[str, list[str]]:
    """The rows of the README's table by their first cell."""
    part = README.partition("| on one H200")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in part.splitlines()]
    return {row[0]: row[1:] for row in rows[2:]}


def speedup(row: list[str]) -> float:
    return float(row[-1].partition(" [")[0])


# Marks


def test_every_mark_has_a_claim_and_every_claim_is_used() -> None:
    used = {found["name"] for text in TEXTS.values() for found in claims.MARK.finditer(text)}
    assert used == set(claims.CLAIMS)


@pytest.mark.parametrize("name", pages.PAGES)
def test_marks_are_closed(name: str) -> None:
    begun = re.findall(r"<!--=(?!NAME)", TEXTS[name])
    assert len(begun) == len(claims.MARK.findall(TEXTS[name]))
    assert all("<!--" not in found["value"] for found in claims.MARK.finditer(TEXTS[name]))


def test_marks_are_filled_from_the_folder_of_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "record.txt").write_text("1.25")
    reading = {"some.claim": lambda results: (results / "record.txt").read_text()}
    monkeypatch.setattr(claims, "CLAIMS", reading)
    page = "It is <!--=some.claim-->9.99<!--/--> times, or <!--=some.claim--><!--/-->."
    filled = "It is <!--=some.claim-->1.25<!--/--> times, or <!--=some.claim-->1.25<!--/-->."
    assert claims.filled(page, tmp_path) == filled
    with pytest.raises(KeyError, match=r"other\.claim"):
        claims.filled("<!--=other.claim-->1<!--/-->", tmp_path)


def test_ranges() -> None:
    assert spread([1.256, 0.9]) == "0.90 to 1.26"
    assert spread([1.0, 1.001]) == "1.00"
    assert percents([0.5, 0.25]) == "25.0 to 50.0 %"
    assert percents([0.5]) == "50.0 %"


# Numbers that are typed


@pytest.mark.parametrize("name", pages.PAGES)
def test_hand_written_pages_have_no_typed_measurements(name: str) -> None:
    assert list(pages.typed_numbers(name, TEXTS[name])) == []


@pytest.mark.parametrize(
    "text",
    [
        "It takes 4.2 ms.",
        "It is 1.5 times as fast.",
        "The ratio is 1.5.",
        "| speedup | 3× |",
        "between 0.82 and 0.95 of cuDNN's speed",
        "8 of 8 gained",
        "53 of the 58 changes",
        "at most 30 % slower",
        "needs 12 GiB",
        "runs at 1,200 TFLOP/s",
        "at the 700 W limit",
        "10 to 20 % from sample to sample",
    ],
)
def test_typed_measurements_are_refused(text: str) -> None:
    assert list(pages.typed_numbers("docs/page.md", f"Before.\n\n- {text}\n"))


@pytest.mark.parametrize(
    "text",
    [
        "<!--=a.claim-->4.2 ms<!--/-->",
        "<!-- part: made by scripts/make_docs.py -->\n4.2 ms\n<!-- until here -->",
        "```text\n4.2 ms\n```",
        "`--bandwidth-gbs 1.25`",
        "    step    194 ms",
        "[log](step-1.5-times.md)",
        "4096 rows with 16 heads on 2 ranks, seed 3, version 1.2.3",
    ],
)
def test_generated_parts_and_examples_are_not(text: str) -> None:
    assert list(pages.typed_numbers("docs/page.md", f"Before.\n\n{text}\n")) == []


def test_every_allowance_is_needed() -> None:
    for name, phrases in pages.ALLOWED.items():
        for phrase in phrases:
            assert phrase in TEXTS[name], (name, phrase)
            assert list(pages.typed_numbers("docs/page.md", f"{phrase}.")), (name, phrase)


def test_every_page_is_generated_or_written_by_hand() -> None:
    for path in sorted((ROOT / "docs").rglob("*.md")):
        name = str(path.relative_to(ROOT))
        by_hand = not name.startswith("docs/results/")
        if not name.startswith("docs/log/"):
            assert (name in pages.PAGES) == by_hand, name
        begins = path.read_text()[:1500]
        assert by_hand != bool(re.search("[Gg]enerated (by|from)", begins)), name


# The README


def test_the_readme_counts_the_trials_of_its_example() -> None:
    records = read_records(RESULTS / "advise-slow_h200.jsonl")
    advised = [one.config["advice"] for one in records if one.study == TRIALS]
    assert claimed("advice.tried-alone") == str(sum(len(one) == 1 for one in advised))
    assert claimed("advice.tried-together") == str(sum(len(one) > 1 for one in advised))


@pytest.mark.parametrize("machine", ["h200", "cpu"])
def test_first_advice_for_other_libraries(machine: str) -> None:
    first = [
        next((t for t in line.get("tried", []) if t["verified_ms"] is not None), None)
        for line in lines(f"foreign_{machine}.jsonl")
    ]
    tried = [one for one in first if one is not None]
    right = [abs(one["verified_ms"] / one["predicted_ms"] - 1) <= 1 / 3 for one in tried]
    assert claimed(f"advice.foreign-{machine}") == f"{sum(right)} of {len(right)}"


def test_first_advice_of_the_walkthrough_is_counted_by_machine() -> None:
    text = (ROOT / "docs" / "results" / "walkthrough.md").read_text()
    counts = re.findall(r"the measured gain of (\d+ of \d+)", text)
    assert counts == [claimed("advice.first-h200"), claimed("advice.first-cpu")]


def test_no_form_of_an_accelerated_model_is_faster_than_its_baseline() -> None:
    by_model: dict[str, dict[str, list[float]]] = {}
    for line in lines("acceleration-graph_h200.jsonl"):
        if "median_ms" in line:
            by_model.setdefault(line["row"], {}).setdefault(line["form"], []).append(
                line["median_ms"]
            )
    fastest = {
        min(median(ms) for form, ms in forms.items() if not form.startswith("stepscope"))
        / median(forms["stepscope-compile-passes"])
        for forms in by_model.values()
        if "stepscope-compile-passes" in forms and len(forms) > 1
    }
    shown = [
        row for what, row in table_rows().items() if not re.search("FP8|of 6|atten|slow", what)
    ]
    assert len(shown) >= 6
    for row in shown:
        assert any(speedup(row) == pytest.approx(ratio, abs=6e-4) for ratio in fastest), row


def test_the_readme_has_the_least_and_the_largest_gain_of_the_steps() -> None:
    leads = []
    for race in races(STEP.results(read_records(RESULTS / "step-race_h200.jsonl"))):
        lead = race.lead()
        assert lead is not None
        leads.append(lead.value)
        tried = [one for name, one in race.heats.items() if name.startswith("baseline: ")]
        times = [one.ms for one in tried if isinstance(one, Heat)]
        best = race.heats[race.best["baseline"]]
        assert isinstance(best, Heat)
        # Forms within 2 % of the fastest trial run off against each other.
        assert best.ms <= 1.02 * min(times), race.name
    shown = {what: speedup(row) for what, row in table_rows().items() if f"of {len(leads)}" in what}
    least, largest = shown.values()
    assert [least, largest] == pytest.approx([min(leads), max(leads)], abs=6e-4)


def test_the_readme_has_the_least_and_the_largest_gain_in_fp8() -> None:
    # A process begins with block 0.
    processes: list[dict[tuple[str, str], list[float]]] = []
    for line in lines("fp8-step_h200.jsonl"):
        if line.get("block") == 0:
            processes.append({})
        if "median_ms" in line:
            of_form = processes[-1].setdefault((line["row"], line["form"]), [])
            of_form.append(line["median_ms"])
    fastest: dict[str, tuple[float, float]] = {}
    for process in processes:
        times = {key: median(ms) for key, ms in process.items()}
        for (row, form), ms in times.items():
            peers = [
                other
                for (name, one), other in times.items()
                if name == row and not one.startswith(("fp8", "bf16"))
            ]
            if peers and form.startswith("fp8"):
                fastest[row] = min(fastest.get(row, (math.inf, 0.0)), (ms, min(peers) / ms))
    gains = [gain for _, gain in fastest.values()]
    shown = [(what, speedup(row)) for what, row in table_rows().items() if "FP8" in what]
    assert [one for _, one in shown] == pytest.approx([min(gains), max(gains)], abs=6e-4)
    assert all(f"of {len(gains)}" in what for what, _ in shown)


def medians(record: Record) -> dict[str | None, float]:
    return {
        one.variant: median(one.values)
        for one in record.series
        if (one.name, one.clock) == ("step", "device")
    }


def test_cudnn_is_the_fastest_of_torch_s_attention() -> None:
    """`sdpa` calls cuDNN for these shapes."""
    several = [
        medians(one)
        for one in read_records(RESULTS / "flash-race_h200.jsonl")
        if re.search(r"_h16_s\d+_d(64|128)_bfloat16", one.case)
    ]
    assert len(several) == 5
    for times in several:
        others = [times[name] for name in ("sdpa_flash", "sdpa_efficient", "flex")]
        assert times["sdpa_cudnn"] < min(others)
    assert table_rows()["attention, causal, mean of 5 shapes"][:2] == ["auto", "cuDNN"]


# Claims of other pages


def test_the_regret_of_auto_is_that_of_its_own_calls() -> None:
    last = [line for line in lines("attention-regret_h200.jsonl") if line["seed"] == 3]
    auto, choice = [], []
    for line in last:
        fastest = min(line["us"][form] for form in line["timed"] if form != "auto")
        auto.append(max(0.0, line["us"]["auto"] / fastest - 1))
        choice.append(line["us"][line["chosen"]] / fastest - 1)
    for name, values in (("auto", auto), ("choice", choice)):
        p95 = f"{100 * np.quantile(values, 0.95):.1f} %"
        worst = f"{100 * max(values):.1f} %"
        assert (claimed(f"regret.{name}-p95"), claimed(f"regret.{name}-worst")) == (p95, worst)
        assert f"{p95}" in (ROOT / "docs" / "results" / "flash.md").read_text()


def test_a_step_takes_at_least_its_energy_over_the_limit() -> None:
    for race in races(STEP.results(read_records(RESULTS / "step-race_h200.jsonl"))):
        for side in ("baseline", "stepscope"):
            drawn = race.draw(side)
            if drawn is not None and drawn.lasts_ms is not None:
                assert drawn.lasts_ms <= drawn.step_ms


def test_pages_agree_on_the_triton_kernels_at_head_dimension_128() -> None:
    page = (ROOT / "docs" / "results" / "flash.md").read_text()
    pattern = r"^\| sdpa\\_cudnn \| \d+,\d+,\d+,128 \| ([\d.]+)"
    lowest = min(float(x) for x in re.findall(pattern, page, re.MULTILINE))
    low, _, high = claimed("attention.triton-d128").partition(" to ")
    assert float(low) == pytest.approx(lowest, abs=0.01)
    assert float(low) < float(high) < 1


def test_studies_with_flags_for_dimensions_are_listed() -> None:
    every = claimed("sizes.all-dimensions")
    assert {"`benchmark`", "`step`", "`ddp`"} <= set(every.split(", "))
