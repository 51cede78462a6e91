"""Records of every study with random changes, like a hostile or damaged file."""

from __future__ import annotations

import copy
import json
from collections import defaultdict
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from grading_records import criterion_record, speed_record
from own_records import own_record
from parallel_records import leaderboard_record
from stepscope.records.schema import encode

RESULTS = Path(__file__).parent.parent / "results"
NUMBERS = (
    0, 0.0, -1, -1.5, 1e308, -1e308, 5e-324, 1e-300, 1, 2**63, 10**400, 1e15, 0.5, 10**30,
)  # fmt: skip
TEXTS = (
    "",
    "x",
    "../../x",
    "/x",
    "\x1b[31mred",
    "a\nb",
    "{",
    "[]",
    "null",
    "{}",
    "\u202e",
    "NaN",
    "[" * 100_000,
    "-1",
    "1e999",
    "é" * 300,
    "latest",
)
WRONG = (None, [], {}, "", 0, True, [[[[]]]])
_LONGEST_LINE = 60_000
_MAX_OF_A_STUDY = 40
_PARTS = ("config", "notes", "attachments", "series", "quantities", "ceilings", "readings")

Json = dict[str, Any]


class Head(msgspec.Struct):
    """Decides whether a line is used: most lines need not be parsed further."""

    study: str = ""
    run: str | None = None


@cache
def real_records() -> dict[str, list[Json]]:
    """The committed records by study, as JSON; synthetic records for studies without any."""
    by_study: dict[str, list[Json]] = defaultdict(list)
    for path in sorted(RESULTS.glob("*.jsonl")):
        for line in path.read_bytes().splitlines():
            if len(line) > _LONGEST_LINE:
                continue
            head = msgspec.json.decode(line, type=Head)
            if head.run is None:
                continue
            if len(by_study[head.study]) < _MAX_OF_A_STUDY:
                by_study[head.study].append(json.loads(line))
    made = {
        "own": [own_record()],
        "leaderboard": [leaderboard_record()],
        "check": [criterion_record(), criterion_record("lse", "lse"), speed_record()],
    }
    for study, records in made.items():
        by_study[study] = [json.loads(encode(record)) for record in records]
    return {study: records for study, records in by_study.items() if records}


def hostile(chance: Random) -> tuple[list[Json], list[Json]]:
    """Some records of one study, and the same records with a few changes."""
    records = real_records()[chance.choice(sorted(real_records()))]
    count = min(len(records), chance.choice((1, 1, 2, 4)))
    first = chance.randrange(len(records) - count + 1)
    base = records[first : first + count]
    changed = copy.deepcopy(base)
    for _ in range(chance.choice((1, 1, 2, 5))):
        _change(chance.choice(changed), chance)
    return base, changed


def _paths(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    entries = (
        list(node.items())
        if isinstance(node, dict)
        else list(enumerate(node[:6]))
        if isinstance(node, list)
        else []
    )
    return [
        inner for key, value in entries for inner in ((*path, key), *_paths(value, (*path, key)))
    ]


def _change(record: Json, chance: Random) -> None:
    """Make one change, most often in measured values; also inside the JSON of a note."""
    by_part = defaultdict(list)
    for location in _paths(record):
        by_part[location[0]].append(location)
    likely = [part for part in by_part if part in _PARTS]
    part = chance.choice(likely if likely and chance.random() < 0.85 else list(by_part))
    *path, last = chance.choice(by_part[part])
    parent: Any = record
    for key in path:
        parent = parent[key]
    value, dice = parent[last], chance.random()
    if dice < 0.12:
        del parent[last]
    elif dice < 0.2:
        parent[last] = chance.choice(WRONG)
    elif isinstance(value, str) and value[:1] in ("{", "[") and dice < 0.7:
        parent[last] = _changed_json(value, chance)
    else:
        parent[last] = _other(value, chance)


def _changed_json(text: str, chance: Random) -> str:
    try:
        inner = {"x": json.loads(text)}
    except (ValueError, RecursionError):
        return text
    if inner["x"]:
        _change(inner, chance)
    return json.dumps(inner.get("x"))


def _other(value: Any, chance: Random) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return chance.choice(NUMBERS)
    if isinstance(value, str):
        return chance.choice(TEXTS)
    if isinstance(value, list) and value and all(isinstance(one, int | float) for one in value):
        same = chance.choice(NUMBERS)
        return [same if chance.random() < 0.5 else chance.choice(NUMBERS) for _ in value]
    if isinstance(value, dict):
        return value | {chance.choice(TEXTS[:-1]): chance.choice((*NUMBERS, *TEXTS))}
    return chance.choice((*NUMBERS, *TEXTS))
