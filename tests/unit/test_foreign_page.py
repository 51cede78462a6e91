"""The page of foreign programs: predictions are compared with verified gains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))


def line(program: str = "hf_llama", **fields: Any) -> dict[str, Any]:
    return {
        "program": program,
        "library": "transformers",
        "errors": [],
        "plain_ms": 100.0,
        "plain_after_ms": 100.0,
        "plain_s": 10.0,
        "hook_flops": 1_000_000,
        "inspect_ms": 101.0,
        "hook_ms": 100.0,
        "inspect_flops": 1_000_000.0,
        "after_ms": 102.0,
        "inspect_s": 13.0,
        "missing": "",
        "device": "NVIDIA H200",
        "cores": 16,
        "torch": "2.11.0",
        "python": "3.12.3",
        "commit": "0123456789abcdef",
        "dirty": False,
        "load_average": 1.0,
        "advised": ["bfloat16"],
        "tried": [trial()],
        "flag": "--bf16",
        "hand_base_ms": 100.0,
        "hand_ms": 37.0,
        "took_s": 60.0,
    } | fields


def trial(**fields: Any) -> dict[str, Any]:
    return {
        "code": "bfloat16",
        "verdict": "kept",
        "predicted_ms": 30.0,
        "range_ms": [20.0, 35.0],
        "verified_ms": 39.0,
        "interval_ms": [38.0, 40.0],
        "base_ms": 100.0,
        "without_effect": "",
    } | fields


def test_no_page_without_results(tmp_path: Path) -> None:
    from foreign_page import foreign_pages

    assert foreign_pages(tmp_path) == {}


def test_page_counts_predictions_within_a_third_and_inside_their_range(tmp_path: Path) -> None:
    from foreign_page import foreign_pages

    later = trial(code="compile", verified_ms=25.0)
    no_effect = trial(code="tf32", without_effect="it had no effect on the script")
    lines = [
        line(tried=[no_effect, trial(), later]),  # within a third, outside its range
        line("hf_vit", tried=[trial(verified_ms=17.0, range_ms=[15.0, 35.0])]),  # only in range
        line("nano_gpt", tried=[trial(verified_ms=-1.0, range_ms=None)]),
        line("timm_vit", errors=["advise: exit code 1: out of memory"], advised=[], tried=[]),
    ]
    del lines[3]["hand_ms"]
    path = tmp_path / "foreign_h200.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    text = foreign_pages(tmp_path)["foreign.md"]
    assert "Of 3 first pieces of advice that were tried, 1 gained within a third" in text
    assert (
        "3 of all 4 predictions that were tried have a range, and 2 of the verified gains" in text
    )
    assert "differs by at most 1.0 % from the hook's time" in text
    assert "- timm_vit: advise: exit code 1: out of memory" in text
    assert "4 programs, NVIDIA H200, torch 2.11.0, Python 3.12.3, commit `0123456789ab`" in text


def test_change_by_flag_is_compared_as_a_fraction_of_its_own_base() -> None:
    from foreign_page import summary_sentences

    sentences = list(summary_sentences([line(hand_base_ms=50.0, hand_ms=20.0)]))
    assert any(
        "differs by at most 1.0 % of the step from the verified one" in one for one in sentences
    )


def test_recorded_steps_are_compared_with_the_same_steps_of_the_hook(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from foreign import same_steps

    hooked = [90.0, 10.0, 11.0, 30.0, 12.0, 11.0, 10.0]
    assert same_steps([11.1, 29.0, 12.2], hooked) == [11.0, 30.0, 12.0]
