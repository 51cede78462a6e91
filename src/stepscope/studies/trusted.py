"""Findings limited by the trust in their records.

A study's view states what its records show. Here, once for all studies and surfaces, a finding
that rests on a record which is not good loses the tone of a success and its conclusion (a cause, a
ranking, a recommendation). Its sentence says what was wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from stepscope.analysis.trust import trust_of
from stepscope.records.schema import Record
from stepscope.records.trust import Trust, reason
from stepscope.report.blocks import Block, Finding
from stepscope.report.format import counted

_IDS_SHOWN = 3
_ENDS = ".!"


def tempered(blocks: Sequence[Block], records: Sequence[Record]) -> tuple[Block, ...]:
    """Limit the findings of a section by the trust in all records of its study."""
    trusts = {record.id: trust_of(record) for record in records if record.status == "ok"}
    if all(trust.good for trust in trusts.values()):
        return tuple(blocks)
    return tuple(temper(block, trusts) if isinstance(block, Finding) else block for block in blocks)


def temper(finding: Finding, trusts: Mapping[str, Trust]) -> Finding:
    """Limit one finding, given the trust in each record by its id.

    A finding that names no records rests on all of them; a finding that rests on no times is only
    affected by invalid records.
    """
    named = [id_ for id_ in finding.records if id_ in trusts]
    used = {id_: trusts[id_] for id_ in (named if finding.records else trusts)}
    doubted = {
        id_: trust
        for id_, trust in used.items()
        if trust.level == "invalid" or (finding.timed and not trust.good)
    }
    if not doubted:
        return finding
    why = doubt(list(used.values()), list(doubted.values()))
    shown = named and len(named) > len(doubted) and len(doubted) <= _IDS_SHOWN
    which = f" ({', '.join(doubted)})" if shown else ""
    return msgspec.structs.replace(
        finding,
        text=f"{finding.text.rstrip().rstrip(_ENDS)}; inconclusive: {why}{which}.",
        tone="warn" if finding.tone == "good" else finding.tone,
        conclusion="",
    )


def doubt(all_of: Sequence[Trust], doubted: Sequence[Trust]) -> str:
    """The most frequent problem of records that are not good, as a clause with its count."""
    reasons = [reason(trust.codes[0]) for trust in doubted]
    most = max(dict.fromkeys(reasons), key=reasons.count)
    if len(all_of) == 1:
        return most
    return f"{most} in {reasons.count(most)} of {counted(len(all_of), 'measurement')}"


def all_good(records: Iterable[Record]) -> bool:
    """True if a view may fit, rank or extrapolate from these records."""
    return all(trust_of(record).good for record in records)


def banner(records: Sequence[Record]) -> str:
    """One sentence for the top of a page; empty where every measurement is good."""
    trusts = [trust_of(record) for record in records if record.status == "ok"]
    doubted = [trust for trust in trusts if not trust.good]
    if not doubted:
        return ""
    noisy = [trust for trust in doubted if trust.level == "noisy"]
    parts = []
    if noisy:
        whose = "the" if len(trusts) == 1 else "their"
        parts.append(
            f"{_sentence(doubt(trusts, noisy))}; {whose} times are unreliable: end other work on"
            " this machine and measure again."
        )
    if invalid := [trust for trust in doubted if trust.level == "invalid"]:
        parts.append(f"{_sentence(doubt(trusts, invalid))}; its numbers are not used.")
    return " ".join(parts)


def _sentence(clause: str) -> str:
    return clause[0].upper() + clause[1:]


def tally(records: Sequence[Record]) -> dict[str, int]:
    """Number of measurements at each level of trust, for programs."""
    levels = Counter(trust_of(record).level for record in records if record.status == "ok")
    return {level: levels[level] for level in ("good", "noisy", "invalid")}
