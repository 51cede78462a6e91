"""`stepscope compare`: the difference between two runs, with an interval and a verdict."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Annotated

import msgspec
import tyro

from stepscope.analysis.compare import (
    Comparison,
    Comparisons,
    compare_records,
    compare_runs,
    exceeds,
    inconclusive,
)
from stepscope.cli.common import StoreOptions, json_line, load_run_or_record, parse
from stepscope.cli.messages import say
from stepscope.errors import UsageError
from stepscope.records.schema import Record
from stepscope.report.format import counted
from stepscope.views.comparison import comparison_table

_GATE_FAILED, _CANNOT_TELL = 3, 4


class CompareOptions(StoreOptions, frozen=True, kw_only=True):
    base: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="BASE")]
    """The baseline: a run, a .jsonl file, or the id of one record."""
    new: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NEW")]
    """The run to compare with BASE: a run, a .jsonl file, or the id of one record."""
    across: bool = False
    """Compare runs of two machines: each time is relative to the time that the measured ceilings
    of its machine allow."""
    fail_above: str | None = None
    """A limit for CI, such as 3%. Exit code 3: a case is significantly slower and its median is
    above the limit, or a case of BASE was not measured in NEW. Exit code 4: no such case, but one
    cannot be judged (too few samples, samples that depend on each other, or a busy machine)."""
    markdown: bool = False
    """Print Markdown with the verdict first, for a comment on a pull request."""
    json: bool = False
    """Print one line of JSON instead of the table."""


def main(words: list[str]) -> int:
    options = parse(
        CompareOptions,
        words,
        "compare",
        "Compare two runs case by case, or two records. The verdict of a case is slower, faster,\n"
        "no difference shown, too few samples, or cannot tell (the machine was busy, the samples\n"
        "spread too far, depend on each other or drift). If a file has several runs of a case,\n"
        "the median of each run is one sample; let the runs of both sides alternate.",
        (
            "stepscope compare latest~1 latest",
            "stepscope compare base.jsonl latest --fail-above 3%",
            "stepscope compare 3f2a9c 81b0d2",
            "stepscope compare base.jsonl new.jsonl --markdown > comment.md",
        ),
    )
    limit = None if options.fail_above is None else _fraction(options.fail_above)
    comparisons = _compare(options)
    beyond = exceeds(comparisons, limit) if limit is not None else ()
    open_cases = inconclusive(comparisons)
    if options.json:
        print(
            json_line(
                {
                    "comparisons": msgspec.to_builtins(comparisons),
                    "beyond_limit": [c.name for c in beyond],
                    "cannot_tell": [c.name for c in open_cases],
                }
            )
        )
    elif options.markdown:
        say(_markdown(comparisons, beyond, open_cases, options.fail_above), end="")
    else:
        from stepscope.report.terminal import print_table

        print_table(comparison_table(comparisons))
        say(_counts(comparisons))
        for c in beyond:
            what = "lost" if c.lost else f"beyond {options.fail_above}"
            say(f"{what}: {c.name}")
        for verdict in dict.fromkeys(c.verdict for c in open_cases if limit is not None):
            names = (c.name for c in open_cases if c.verdict == verdict)
            say(f"not judged, {verdict}: {', '.join(names)}")
    if beyond:
        return _GATE_FAILED
    return _CANNOT_TELL if open_cases and limit is not None else 0


def _markdown(
    comparisons: Comparisons,
    beyond: Sequence[Comparison],
    open_cases: Sequence[Comparison],
    fail_above: str | None,
) -> str:
    """The answer as a heading, then the table."""
    from stepscope.report.text import markdown

    if fail_above is None:
        answer = _counts(comparisons)
    elif beyond:
        answer = f"❌ {counted(len(beyond), 'case')} lost, or slower by more than {fail_above}"
    elif open_cases:
        answer = f"⚠️ cannot tell for {counted(len(open_cases), 'case')}; none slower by more than"
        answer += f" {fail_above}"
    else:
        answer = f"✅ no case is slower by more than {fail_above}"
    return f"### Stepscope: {answer}\n\n{markdown(comparison_table(comparisons))}"


def _counts(comparisons: Comparisons) -> str:
    verdicts = Counter(c.verdict for c in comparisons)
    return ", ".join(f"{times} {verdict}" for verdict, times in verdicts.items())


def _compare(options: CompareOptions) -> Comparisons:
    base, new = load_run_or_record(options.base, options), load_run_or_record(options.new, options)
    if isinstance(base, Record) and isinstance(new, Record):
        return compare_records(base, new, across=options.across)
    if isinstance(base, Record) or isinstance(new, Record):
        raise UsageError(
            f"{options.base} and {options.new} are a run and a single record",
            "compare two runs or two records",
        )
    comparisons = compare_runs(base, new, across=options.across)
    if all(c.verdict == "not compared" for c in comparisons):
        raise UsageError(
            f"{options.base} and {options.new} have no measured case in common",
            "list their cases with `stepscope show`",
        )
    return comparisons


def _fraction(text: str) -> float:
    """Parse `3%` or `0.03`. A bare `3` is refused: it would mean 300 %."""
    if not re.fullmatch(r"\d+(\.\d+)?%?", text):
        raise UsageError(f"--fail-above {text!r} is not a fraction", "give one such as 3% or 0.03")
    if text.endswith("%"):
        return float(text[:-1]) / 100
    if float(text) > 1:
        raise UsageError(
            f"--fail-above {text} would be {float(text):.0%}",
            f"give {text}% or {float(text) / 100:g}; or {float(text):.0%} if that is intended",
        )
    return float(text)
