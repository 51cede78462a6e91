"""Write the ratios of realized to predicted gains of `advise`, from the records in results/.

    python scripts/make_advice_ranges.py            write the file of observations
    python scripts/make_advice_ranges.py --check    exit with 1 if it is out of date

The ranges that `advise` prints come from this file. It contains the realized gain over the gain
that the current rules predict, by kind of device and by rule: of every change that was tried alone
by `advise --verify` (`results/advise-*.jsonl`), with the noise of its trial, and of every pair of
records of an H200 that differ by one setting (`benchmarks/advice_backtest.py`). Run it after
changing a rule, or with new records of `advise --verify`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import advice_backtest  # noqa: E402
import own_step_backtest  # noqa: E402

from stepscope.records.jsonl import read_records  # noqa: E402

OUT = ROOT / "src" / "stepscope" / "analysis" / "advice" / "backtest.json"
CODES = {"graph": "cuda-graph"}
"""Names of changes in pairs of records, and the rules that predict them."""
SEVERAL = "together"
DIGITS = 3


def observations(results: Path) -> Iterator[tuple[str, str, float]]:
    """Yield kind of device, rule, and realized over predicted gain."""
    for path in sorted(results.glob("advise-*.jsonl")):
        records = read_records(path)
        kind = "gpu" if own_step_backtest.facts_in(records).on_gpu else "cpu"
        for one in own_step_backtest.repredicted(records):
            if not one.together and one.now_ms and one.now_ms > 0:
                yield kind, one.code, one.realized_ms / one.now_ms
    files = [
        (name, read_records(results / name))
        for name in advice_backtest.FILES
        if (results / name).exists()
    ]
    for pair in advice_backtest.pairs(files):
        if pair.advised and pair.change != SEVERAL:
            yield "gpu", CODES.get(pair.change, pair.change), pair.realized_ms / pair.predicted_ms


def table(results: Path) -> str:
    ratios_of: dict[str, dict[str, list[float]]] = {"cpu": {}, "gpu": {}}
    for kind, code, ratio in observations(results):
        ratios_of[kind].setdefault(code, []).append(round(ratio, DIGITS))
    ordered = {
        kind: {code: sorted(ratios) for code, ratios in sorted(rules.items())}
        for kind, rules in ratios_of.items()
    }
    lines = [
        f" {json.dumps(kind)}: {{\n"
        + ",\n".join(f"  {json.dumps(code)}: {ratios}" for code, ratios in rules.items())
        + "\n }"
        for kind, rules in ordered.items()
    ]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=ROOT / "results")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    text = table(args.results)
    if args.check:
        return 0 if OUT.read_text() == text else 1
    OUT.write_text(text)
    print(f"wrote {OUT}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
