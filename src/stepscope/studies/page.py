"""One page from any records: headline, a section for each study, the machine, every record."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import itemgetter

import msgspec

from stepscope.analysis.checks import check_record
from stepscope.analysis.plausibility import plausible
from stepscope.analysis.verdict import Verdict
from stepscope.errors import StepscopeError, in_one_line
from stepscope.records.schema import Ceiling, Environment, Record
from stepscope.report.blocks import Block, Finding, Page, Section, Table
from stepscope.report.format import bytes_, counted, duration, rate
from stepscope.report.tables import col, table
from stepscope.studies.registry import viewables
from stepscope.studies.trusted import banner, tempered

_SHOWN = {
    "device_name": "device",
    "device_count": "devices",
    "device_memory_bytes": "device memory",
    "driver": "driver",
    "cuda": "CUDA",
    "cudnn": "cuDNN",
    "power_limit_w": "power limit, W",
    "max_sm_clock_mhz": "highest SM clock, MHz",
    "cpu": "CPU",
    "cpu_cores": "CPU cores",
    "threads": "torch threads",
    "host_memory_bytes": "host memory",
    "load_average": "load average at the start",
    "platform": "system",
    "python": "Python",
    "torch": "torch",
    "triton": "Triton",
    "stepscope": "Stepscope",
    "commit": "commit",
    "dirty": "uncommitted changes",
}

_MAX_CHARACTERS = 2_000
_UNEXPECTED: tuple[type[Exception], ...] = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    TypeError,
    ValueError,
)
"""Exceptions of a view on records that no check foresaw. Tests of hostile records empty it."""


def make_page(records: Sequence[Record], verdict: Verdict | None = None) -> Page:
    """The page of these records, with their verdict if it is known. Pure: it measures nothing."""
    if not records:
        raise StepscopeError("there are no records to show", "create some with `stepscope run`")
    records = [plausible(record) for record in records]
    sections = tuple(study_sections(records))
    devices = list(dict.fromkeys(record.environment.device_name for record in records))
    return Page(
        title=f"{_what(records)} on {', '.join(devices)}",
        subtitle=_subtitle(records),
        headline=headline(records) or _status_table(records),
        sections=(*sections, _machine_section(records), _records_section(records)),
        banner=banner(records),
        verdict=verdict or verdict_of(records),
    )


def verdict_of(records: Sequence[Record]) -> Verdict | None:
    """The first verdict that a study gives on these records, in the order of a page."""
    records = [plausible(record) for record in records]
    for study in viewables().values():
        with explained(study.name):
            verdict = study.verdict(records)
        if verdict is not None:
            return verdict
    return None


def answers(sections: Sequence[Section]) -> Iterator[tuple[str, str]]:
    """The title and the answer of each section: its first finding, a success before the others."""
    for section in sections:
        findings = [block for block in section.blocks if isinstance(block, Finding)]
        best = next((finding for finding in findings if finding.tone == "good"), None)
        if answer := best or next(iter(findings), None):
            yield section.title, answer.sentence


def _what(records: Sequence[Record]) -> str:
    """The program, if all records are of the same one; otherwise the study, if there is one."""
    programs = {str(record.config["script"]) for record in records if record.config.get("script")}
    studies = {record.study for record in records}
    if len(programs) == 1:
        return programs.pop()
    if len(studies) == 1 and (study := viewables().get(studies.pop())) is not None:
        return study.title
    return "Training steps"


def study_sections(records: Sequence[Record]) -> Iterator[Section]:
    for study in viewables().values():
        own = [plausible(record) for record in records if record.study == study.name]
        if not own:
            continue
        with explained(study.name):
            blocks = tempered(study.view(own), own)
        yield Section(name=study.name, title=study.title, question=study.question, blocks=blocks)


@contextmanager
def explained(study: str) -> Iterator[None]:
    """Report malformed records of a study as a one-line error, whatever is wrong with them."""
    expected: tuple[type[Exception], ...] = (msgspec.DecodeError, *_UNEXPECTED)
    try:
        yield
    except expected as error:
        kind = "" if isinstance(error, msgspec.DecodeError) else f"{type(error).__name__}: "
        raise StepscopeError(
            f"the records of {study} are malformed: {kind}{in_one_line(error)}",
            "were they created by another version of Stepscope?",
        ) from error


def _subtitle(records: Sequence[Record]) -> str:
    first, last = min(r.started for r in records), max(r.started for r in records)
    when = first[:16].replace("T", " ")
    if last[:10] != first[:10]:
        when += f" to {last[:10]}"
    environment = records[-1].environment
    runs = ", ".join(dict.fromkeys(record.run for record in records))
    return (
        f"{counted(len(records), 'record')}, {when} UTC, torch {environment.torch},"
        f" Stepscope {environment.stepscope}, run {runs}"
    )


def headline(records: Sequence[Record]) -> Table | None:
    """The headline table of the first study that has one."""
    for study in viewables().values():
        own = [plausible(record) for record in records if record.study == study.name]
        with explained(study.name):
            first = study.headline(own)
        if first is not None:
            return first
    return None


def _status_table(records: Sequence[Record]) -> Table:
    """Number of cases by study and status, for records without a headline table."""
    cases = Counter((record.study, record.status) for record in records)
    return table(
        "headline",
        "Cases by outcome",
        [(study, status, count) for (study, status), count in cases.items()],
        [
            col("study", itemgetter(0)),
            col("status", itemgetter(1)),
            col("cases", itemgetter(2), "count"),
        ],
    )


def _machine_section(records: Sequence[Record]) -> Section:
    machines: dict[str, Record] = {}
    for record in records:
        machines.setdefault(record.environment.device_name, record)
    tables: list[Block] = [*_lacks(records)]
    for index, record in enumerate(machines.values()):
        suffix = f"-{index + 1}" if index else ""
        tables.append(_environment_table(record.environment, f"environment{suffix}"))
        if record.ceilings:
            tables.append(_ceilings_table(record, f"ceilings{suffix}"))
    return Section(
        name="machine",
        title="The machine",
        question="Which machine was measured, and what are its limits?",
        blocks=tuple(tables),
    )


def _lacks(records: Sequence[Record]) -> Iterator[Finding]:
    """What the machine lacks, in one sentence."""
    reasons = Counter(
        re.split(r"[;:]", record.reason)[0] for record in records if record.status == "skipped"
    )
    if not reasons:
        return
    skipped = reasons.total()
    listed = "; ".join(
        f"{reason} ({count})" if len(reasons) > 1 else reason
        for reason, count in reasons.most_common()
    )
    yield Finding(
        code="machine.lacks",
        text=f"{skipped} of {counted(len(records), 'case')} cannot run here: {listed}.",
        values={"skipped": skipped, "of": len(records)},
        timed=False,
    )


def _environment_table(environment: Environment, name: str) -> Table:
    def text(field: str) -> str:
        value = getattr(environment, field)
        if field.endswith("_bytes"):
            return bytes_(value)
        if isinstance(value, bool):
            return "yes" if value else "no"
        return f"{value:g}" if isinstance(value, float) else str(value)

    shown = [field for field in _SHOWN if getattr(environment, field) is not None]
    return table(name, "Environment", shown, [col("what", _SHOWN.get), col("value", text)])


def _ceilings_table(record: Record, name: str) -> Table:
    return table(
        name,
        "Ceilings",
        [one.checked(record.environment) for one in record.ceilings],
        [
            col("limit", lambda ceiling: ceiling.name),
            col("value", lambda ceiling: _at_least(ceiling)),
            col("source", lambda ceiling: ceiling.source),
            col("how", lambda ceiling: "; ".join(filter(None, (ceiling.detail, ceiling.doubt)))),
        ],
        caption="Measured here: the best of several shapes and repetitions on random data."
        " The data sheet's peak is listed too if the device is known.",
    )


def _at_least(ceiling: Ceiling) -> str:
    """The rate, as a lower bound if the measurement is doubtful."""
    return f"{'≥ ' if ceiling.doubt else ''}{rate(ceiling.value, ceiling.unit)}"


def _records_section(records: Sequence[Record]) -> Section:
    def failed_checks(record: Record) -> str:
        return ", ".join(check.code for check in check_record(record)) or record.reason

    def samples(record: Record) -> int:
        return len(record.series[0].values) if record.series else 0

    every_record = table(
        "records",
        "Every record",
        records,
        [
            col("record", lambda record: record.id, key=True),
            col("study", lambda record: record.study, key=True),
            col("case", lambda record: record.case, key=True),
            col("status", lambda record: record.status, key=True),
            col("samples", samples, "count", key=True),
            col("took", lambda record: duration(record.elapsed_s * 1e3), key=True),
            col("failed checks or reason", failed_checks, key=True),
        ],
        details=_details,
        caption="Open a row for its raw samples, quantities and readings.",
    )
    return Section(
        name="records",
        title="Records",
        question="What exactly was measured?",
        blocks=(every_record,),
    )


def _details(record: Record) -> str:
    """Everything but what the machine section says already, a line for each part."""
    lines = []
    for name in record.__struct_fields__:
        value = getattr(record, name)
        if name == "series":
            lines += [f"series {s.label}, {s.clock} clock: {_json(s)}" for s in record.series]
        elif name == "notes":
            lines += [f"note {key}: {_short(text)}" for key, text in record.notes.items()]
        elif name == "attachments":
            lines += [f"{key}: {_short(_json(data))}" for key, data in record.attachments.items()]
        elif name not in ("environment", "ceilings"):
            lines.append(f"{name}: {_json(value)}")
    return "\n".join(lines)


def _short(text: str) -> str:
    """An attachment may be an entire profile, which the page shows in a better form."""
    return text if len(text) <= _MAX_CHARACTERS else f"{len(text):,} characters, see the record"


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()
