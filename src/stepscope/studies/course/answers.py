"""The blocks of a study's view that answer a question. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from stepscope.analysis.plausibility import plausible
from stepscope.records.schema import Record
from stepscope.report.blocks import Block, Finding
from stepscope.studies.course.needs import NEEDS
from stepscope.studies.course.problem import Filter, Part, Show
from stepscope.studies.course.strategies import strategy_findings
from stepscope.studies.page import explained
from stepscope.studies.registry import viewables
from stepscope.studies.trusted import tempered

_View = tuple[Block, ...]


class Views:
    """Views of subsets of records; equal subsets of one study are viewed once."""

    def __init__(self, records: Iterable[Record]) -> None:
        self._by_study: dict[str, list[Record]] = {}
        for record in records:
            self._by_study.setdefault(record.study, []).append(plausible(record))
        self._seen: dict[tuple[str, ...], _View] = {}

    def records(self, show: Show, *filters: Filter) -> list[Record]:
        """The records that answer: those of the need's study that pass every filter."""
        own = self._by_study.get(NEEDS[show.need].study, ())
        return [
            record for record in own if all(matches(record, one) for one in (show.only, *filters))
        ]

    def blocks(self, show: Show, records: Sequence[Record]) -> Iterator[Block]:
        """The chosen findings of the view of these records, then its tables and figures."""
        if not records:
            return
        view = self._view(records)
        if show.strategies:
            yield from tempered(tuple(strategy_findings(records, show.strategies)), records)
        for code in show.findings:
            for block in view:
                if (
                    isinstance(block, Finding)
                    and block.code == code
                    and show.among.items() <= block.values.items()
                ):
                    yield block
        for beginning in show.blocks:
            for block in view:
                if not isinstance(block, Finding) and block.name.startswith(beginning):
                    yield block

    def _view(self, records: Sequence[Record]) -> _View:
        key = tuple(record.id for record in records)
        if key not in self._seen:
            study = viewables()[records[0].study]
            with explained(study.name):
                self._seen[key] = tempered(study.view(records), records)
        return self._seen[key]


def matches(record: Record, filter: Filter) -> bool:
    """True if each field has an allowed value; a field that the case lacks does not match."""
    return all(record.config.get(name) in allowed for name, allowed in filter.items())


def distinct(blocks: Iterable[Block], before: Sequence[Block] = ()) -> tuple[Block, ...]:
    """Blocks without repetitions, and without those that were shown before."""
    kept: list[Block] = []
    for block in blocks:
        if block not in kept and block not in before:
            kept.append(block)
    return tuple(kept)


def part_needs(part: Part) -> tuple[str, ...]:
    """The needs that this machine measures."""
    needs = dict.fromkeys(show.need for show in part.shows)
    return tuple(need for need in needs if not NEEDS[need].committed_only)
