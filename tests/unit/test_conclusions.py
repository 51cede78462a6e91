"""Effects and conclusions: nothing is concluded from what the samples do not show."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import stepscope
from hostile_records import real_records
from stepscope.analysis import effects
from stepscope.analysis.conclusions import conclude, deduced, joined
from stepscope.analysis.effects import Effect, exact
from stepscope.records.schema import Record, Series, decode
from stepscope.records.stats import MIN_SAMPLES, summarize
from stepscope.report.blocks import Finding
from stepscope.studies.page import study_sections
from stepscope.studies.registry import viewables
from view_blocks import findings_of

SOURCE = Path(stepscope.__file__).parent
FASTER, SLOWER = Effect(0.7, 0.6, 0.8), Effect(1.3, 1.2, 1.4)
UNCLEAR = Effect(0.689, 0.461, 2.38)

CLAIMS = re.compile(
    r"\b(because|therefore|explains?|comes from|due to|dominates|bottleneck|overlaps with"
    r"|is the fastest|are the fastest|the best bucket|stops being worthwhile|communication-bound:"
    r"|limits this step|limited by bytes|what recovers it|cheaper|is slower|faster than)\b",
    re.IGNORECASE,
)
"""Words of causes, rankings and recommendations."""

WITHOUT_EFFECT = {
    # Less memory, which is counted.
    "checkpointing.saving", "checkpointing.least-memory", "checkpointing.budget",
    # The parts of a trace add up to its time.
    "trace.attributed",
    # The trial that was kept by the interval of its own ratio.
    "advise.best",
}  # fmt: skip
"""Timed findings whose success is not a comparison of samples."""


@pytest.mark.parametrize("effect", [UNCLEAR, Effect(1.04, 0.984, 1.33), Effect(1.0, 1.0, 1.0)])
def test_an_interval_with_the_neutral_value_shows_nothing(effect: Effect) -> None:
    assert (effect.shown, effect.above, effect.below) == (False, False, False)
    assert conclude("It is slower.", SLOWER, effect) == ""


def test_all_effects_of_a_conclusion_have_to_be_shown() -> None:
    assert (FASTER.below, SLOWER.above) == (True, True)
    assert conclude("It is slower.", SLOWER, FASTER) == "It is slower."
    assert conclude("It is slower.", SLOWER.against(1.3)) == ""
    assert SLOWER.against(2.0).below
    assert SLOWER.times(2.0) == Effect(2.6, 2.4, 2.8)
    assert exact(3.0).shown
    assert not exact(0.0).shown
    assert joined(deduced("A."), conclude("B.", UNCLEAR), deduced("C.")) == "A. C."


def test_a_conclusion_without_an_effect_cannot_be_built() -> None:
    with pytest.raises(TypeError):
        conclude("It is slower.")  # type: ignore[call-arg]


def samples(count: int) -> list[float]:
    return [10.0 + 0.01 * index for index in range(count)]


@pytest.mark.parametrize("count", range(1, MIN_SAMPLES))
def test_few_samples_show_nothing(count: int) -> None:
    few, many = samples(count), [2 * value for value in samples(20)]
    longer = [2 * value for value in few]
    for effect in (
        effects.ratio(few, many),
        effects.paired(few, longer),
        effects.difference(few, longer),
        effects.level(summarize(few)),
        effects.quotient(summarize(many), summarize(few)),
    ):
        assert not effect.shown
        assert (effect.low, effect.high) == (-math.inf, math.inf)


def test_effects_of_clear_samples_are_shown() -> None:
    base, new = samples(20), [2 * value for value in samples(20)]
    assert effects.ratio(base, new).above
    assert effects.paired(new, base).below
    assert effects.difference(base, new).above
    assert effects.quotient(summarize(base), summarize(new)).below
    assert effects.part(5.0, summarize(base)).above
    assert not effects.part(0.01, summarize(base)).shown


@given(
    st.lists(st.floats(0.1, 10.0), min_size=5, max_size=12),
    st.lists(st.floats(0.1, 10.0), min_size=5, max_size=12),
)
def test_a_quotient_of_summaries_contains_every_ratio_of_their_ends(
    base: list[float], new: list[float]
) -> None:
    one, other = summarize(base), summarize(new)
    effect = effects.quotient(other, one)
    for above in (other.low, other.median, other.high):
        for below in (one.low, one.median, one.high):
            assert effect.low * (1 - 1e-12) <= above / below <= effect.high * (1 + 1e-12)


def test_only_one_module_makes_conclusions() -> None:
    """mypy rejects a plain string as a conclusion; nothing else may turn one into it."""
    makers = set()
    for path in SOURCE.rglob("*.py"):
        if "Conclusion" not in (text := path.read_text()):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("Conclusion"):
                makers.add(path.relative_to(SOURCE).as_posix())
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("cast"):
                assert "Conclusion" not in ast.unparse(node), path
    assert makers == {"analysis/conclusions.py"}


def test_deductions_are_made_only_in_findings_that_rest_on_no_times() -> None:
    """A call with `deduced` also has `timed=False`, by itself or as the default of its builder."""
    for path in SOURCE.rglob("*.py"):
        if "deduced" not in (text := path.read_text()):
            continue
        tree = ast.parse(text)
        builders = (
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef) and node.name == "_finding"
        )
        untimed_by_default = any(
            "timed: bool=False" in (code := ast.unparse(builder)) or "timed=False" in code
            for builder in builders
        )
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and (name := ast.unparse(node.func).split(".")[-1]) in (
                "Finding", "finding", "_finding",
            ):  # fmt: skip
                words = "\n".join(map(ast.unparse, (*node.args, *node.keywords)))
                if "deduced(" in words:
                    by_default = name == "_finding" and untimed_by_default
                    assert by_default or "timed=False" in words, (path, node.lineno)


@cache
def committed(study: str) -> tuple[Record, ...]:
    return tuple(decode(msgspec.json.encode(raw)) for raw in real_records()[study])


def findings(records: Sequence[Record]) -> list[Finding]:
    return [one for section in study_sections(records) for one in findings_of(section.blocks)]


@pytest.mark.parametrize("study", sorted(viewables()))
def test_nothing_is_concluded_if_no_effect_is_shown(
    study: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All committed records, with intervals of samples that exclude nothing."""
    above, below = Effect.above.fget, Effect.below.fget  # type: ignore[attr-defined]
    monkeypatch.setattr(Effect, "above", property(lambda e: not e.sampled and above(e)))
    monkeypatch.setattr(Effect, "below", property(lambda e: not e.sampled and below(e)))
    shown = findings(committed(study))
    assert shown
    for finding in (one for one in shown if one.timed):
        assert not finding.conclusion, finding.code
        assert not CLAIMS.search(finding.sentence), finding.sentence
        assert finding.tone != "good" or finding.code in WITHOUT_EFFECT, finding.sentence


def spread(record: Record) -> Record:
    """Samples divided and multiplied by 1.6, alternating: still trusted, but wide."""

    def wide(series: Series) -> Series:
        if series.unit != "ms" or len(series.values) < MIN_SAMPLES:
            return series
        values = (v * (1.6 if i % 2 else 1 / 1.6) for i, v in enumerate(series.values))
        return msgspec.structs.replace(series, values=tuple(values))

    return msgspec.structs.replace(record, series=tuple(map(wide, record.series)))


@pytest.mark.parametrize("study", ["ddp", "sharding", "fsdp", "compile"])
def test_nothing_is_compared_on_noisy_samples(study: str) -> None:
    """Wide samples hide the differences between strategies, which are below a factor of 2."""
    for finding in findings([spread(record) for record in committed(study)]):
        if finding.timed:
            assert finding.tone != "good", finding.sentence
            assert not CLAIMS.search(finding.conclusion), finding.sentence
