"""Generated parts of docs/traces.md, docs/integrations.md and docs/own-step.md: how fast traces are
read, traces against other tools, the cost of a callback, and rehearsals of published jobs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from page_parts import lines_of, replaced

from stepscope.report.format import bytes_, duration
from stepscope.report.tables import col, table
from stepscope.report.text import markdown

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

from rehearsal_published import PAIRS, row  # noqa: E402

TRACES, INTEGRATIONS, OWN_STEP = "docs/traces.md", "docs/integrations.md", "docs/own-step.md"
PAGES = (TRACES, INTEGRATIONS, OWN_STEP)
SPEED = "<!-- speed: benchmarks/job_reading.py -->"
TOOLS = "<!-- tools: benchmarks/public_traces.py -->"
LEDGERS = "<!-- ledgers: benchmarks/public_traces.py -->"
COST = "<!-- cost: benchmarks/callback_cost.py -->"
OBSERVER = "<!-- observer: benchmarks/observer_cost.py -->"
PUBLISHED = "<!-- published: benchmarks/rehearsal_published.py -->"

Line = dict[str, Any]


def loop_pages(root: Path) -> dict[str, str]:
    """Return the pages with their parts regenerated."""
    results = root / "results"
    texts = {name: (root / name).read_text() for name in PAGES}
    for name, begin, text in (
        (TRACES, SPEED, _speed(lines_of(results / "job-reading_cpu.jsonl"))),
        (TRACES, TOOLS, _tools(results)),
        (TRACES, LEDGERS, _ledgers(lines_of(results / "public-traces.jsonl"))),
        (INTEGRATIONS, COST, _cost(lines_of(results / "callback-cost_cpu.jsonl"))),
        (INTEGRATIONS, OBSERVER, _observer(lines_of(results / "observer_cpu.jsonl"))),
        (OWN_STEP, PUBLISHED, _published()),
    ):
        texts[name] = replaced(texts[name], begin, text)
    return texts


def _speed(lines: list[Line]) -> str:
    one = lines[-1]
    each = one["cpu_seconds"] / one["ranks"]
    rows = [
        ("CPU time", f"{one['cpu_seconds']:.0f} s, {each:.1f} s for a rank"),
        ("on free cores", f"{one['cpu_seconds'] / one['cores']:.0f} s, by the CPU time"),
        ("measured", f"{one['seconds']:,.0f} s, with a load average of {one['load_average']:.0f}"),
        ("peak memory of all processes", bytes_(one["peak_bytes"])),
    ]
    about = (
        f"{one['ranks']} ranks of {one['megabytes']:.0f} MB (gzipped, {one['events']:,} events and"
        f" {one['steps']} steps each, {one['collectives']:,} collectives per rank compared), on"
        f" {one['cores']} cores ({one['machine']}):"
    )
    columns = [col("", lambda row: row[0]), col(" ", lambda row: row[1])]
    return f"{about}\n\n{markdown(table('speed', '', rows, columns)).strip()}"


def _tools(results: Path) -> str:
    read = {line["trace"]: line for line in lines_of(results / "public-traces.jsonl")}
    other = json.loads((results / "public-traces-other-tools.json").read_text())["rows"]
    rows = [pair for one in other for pair in ((one, one), (one, read[one["trace"]]))]

    def cell(name: str) -> Any:
        return lambda pair: f"{pair[1][name]:.3f}"

    columns = [
        col("trace", lambda pair: pair[0]["name"] if pair[1] is pair[0] else ""),
        col("tool", lambda pair: pair[0]["tool"] if pair[1] is pair[0] else "Stepscope"),
        col("idle", cell("idle_ms"), "number"),
        col("computation", cell("compute_ms"), "number"),
        col("other", cell("other_ms"), "number"),
        col("overlap", _overlap, "number"),
    ]
    return markdown(table("tools", "", rows, columns)).strip()


def _overlap(pair: tuple[Line, Line]) -> str:
    """Share of the communication that is overlapped, where the other tool states it."""
    return f"{pair[1]['overlap']:.2%}".replace("%", " %") if "overlap" in pair[0] else ""


def _ledgers(lines: list[Line]) -> str:
    closed = [line for line in lines if not line.get("refused") and not line["doubt"]]
    assert all(abs(line["rest_ms"]) < 1e-6 for line in lines if "rest_ms" in line)
    text = (
        f"Of {len(lines)} public traces, {len(closed)} have a ledger that adds up; for the others"
        " the output is the reason in one line:"
    )
    open_ones = [line for line in lines if line not in closed]
    columns = [
        col("trace", _name, "code"),
        col("reason", _reason),
    ]
    return f"{text}\n\n{markdown(table('ledgers', '', open_ones, columns)).strip()}"


def _name(line: Line) -> str:
    path = line["trace"].removeprefix("tests/").removeprefix("data/").removeprefix("traces/")
    return str(path.removesuffix(".gz").removesuffix(".json"))


def _reason(line: Line) -> str:
    reason = line.get("refused") or line["doubt"]
    return str(reason).removeprefix(Path(line["trace"]).name).strip().partition(": Object")[0]


def _cost(lines: list[Line]) -> str:
    analysis = next(line for line in lines if line["when"] == "analysis")
    steps = [line for line in lines if "library" in line]
    rows = [(library, steps) for library in dict.fromkeys(line["library"] for line in steps)]

    def micro(library: str, when: str) -> str:
        (line,) = (x for x in steps if x["library"] == library and x["when"] == when)
        return f"{line['microseconds']:.0f} µs"

    columns = [
        col("CPU time of a step that is not recorded", lambda row: row[0]),
        *(
            col(when, lambda row, when=when: micro(row[0], when), "number")
            for when in dict.fromkeys(line["when"] for line in steps)
        ),
    ]
    # A step that is a thousand times as long.
    after, during = (
        f"{max(line['microseconds'] for line in steps if line['when'] == when):.0f} ms"
        for when in ("after the recording", "during the warm-up")
    )
    text = (
        f"That is below 0.1 % of steps longer than {after}, {during} during the warm-up. The"
        " analysis after the last recorded step runs in the training process, once:"
        f" {duration(1e3 * analysis['seconds'])} of CPU time for the model of the example, whose"
        f" steps have {analysis['operators']:,.0f} operators. Measured on a"
        f" {analysis['processor']} (`python benchmarks/callback_cost.py`)."
    )
    return f"{markdown(table('cost', '', rows, columns)).strip()}\n\n{text}"


def _observer(lines: list[Line]) -> str:
    """The cost of an observer, and what it found."""
    found = {line["what"]: line for line in lines}
    cost, even, noisy = (found[name] for name in ("cost", "even", "noisy"))
    named = [
        f"one that {doing} was named at step {found[name]['named_at']}"
        for name, doing in (("straggler", "computes 5 % longer"), ("loader", "loads 5 ms longer"))
        if (found[name].get("rank"), found[name].get("part"))
        == (found[name].get("planted"), "compute" if name == "straggler" else "loader")
    ]
    assert len(named) == 2, "the record has a rank that was not named"
    return (
        f"A step of DistributedDataParallel with a DataLoader costs {cost['process_us']:.0f} µs of"
        f" CPU time more with an observer, {100 * cost['share_of_100_ms']:.2f} % of a step of"
        f" 100 ms. Of four gloo ranks with steps of 100 ms, {' and '.join(named)}. There were"
        f" {even['alarms']} alarms in {even['steps']:,} even steps of 10 ms, and"
        f" {noisy['alarms']} in {noisy['steps']:,} steps of four ranks whose lengths vary by 20 %."
        f" Measured on two idle cores of an {cost['processor']}"
        " (`python benchmarks/observer_cost.py`)."
    )


def _published() -> str:
    rows = [row(pair) for pair in PAIRS]
    columns = [
        col("job", lambda one: one.pair.name),
        col("ranks", lambda one: f"{one.pair.recorded.ranks} to {one.pair.predicted.ranks}"),
        col("communication", lambda one: f"{one.communication:.0%}".replace("%", " %"), "number"),
        col("published tokens/s", lambda one: f"{one.pair.predicted.rate:,.0f}", "number"),
        col("predicted", lambda one: f"{one.rate:,.0f}", "number"),
        col("error", lambda one: _error(one.rate, one.pair.predicted.rate), "number"),
        *_memory_columns(),
    ]
    return markdown(table("published", "", rows, columns)).strip()


def _memory_columns() -> Iterator[Any]:
    for title, text in (
        ("published GiB", lambda one: f"{one.pair.predicted.gib:.1f}"),
        ("predicted GiB", lambda one: f"{one.gib:.1f}"),
        ("error of memory", lambda one: _error(one.gib, one.pair.predicted.gib)),
    ):
        yield col(title, lambda one, text=text: "" if one.gib is None else text(one), "number")


def _error(predicted: float, published: float) -> str:
    return f"{predicted / published - 1:+.1%}".replace("%", " %").replace("-", "−")
