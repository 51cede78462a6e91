"""The model of gradient buckets, on records with a given overhead and bandwidth."""

from __future__ import annotations

from math import sqrt
from typing import Any

import msgspec
import pytest

from parallel_records import ddp_record
from sample_records import times
from stepscope.records.schema import Quantity, Record
from stepscope.studies.registry import find_study
from stepscope.studies.trusted import tempered
from view_blocks import coded, codes, figures_of, rows_of, table_of

SIZE = 2**29
COUNTS = {"naive": 40, "flat": 1, "overlap": 40, "bucketed 1 MiB": 30, "bucketed 10 MiB": 10}


def on_link(
    overhead_ms: float = 2.0, bytes_per_ms: float = SIZE / 50, slow: float = 1.0, **options: Any
) -> Record:
    """Reductions that take s/w + n·o; those of the small buckets take `slow` times as long."""
    base = ddp_record(**options)
    series = [one for one in base.series if one.name != "communication"]
    for seed, (name, count) in enumerate(COUNTS.items()):
        ms = (SIZE / bytes_per_ms + count * overhead_ms) * (slow if name == "bucketed 1 MiB" else 1)
        for rank in range(base.config["ranks"]):
            series.append(
                times("communication", ms, "host", variant=name, rank=rank, seed=seed, spread=0.001)
            )
    reductions = (
        Quantity(name="reductions", variant=name, value=count, unit="messages")
        for name, count in COUNTS.items()
    )
    return msgspec.structs.replace(
        base, series=tuple(series), quantities=(*base.quantities, *reductions)
    )


def test_overhead_bandwidth_and_best_size_are_fitted() -> None:
    finding = coded(find_study("ddp").view([on_link()]), "ddp.buckets")
    values: dict[str, Any] = dict(finding.values)
    assert values["overhead_ms"] == pytest.approx(2.0, rel=0.02)
    assert values["overhead_low_ms"] <= values["overhead_ms"] <= values["overhead_high_ms"]
    assert values["bytes_per_s"] == pytest.approx(SIZE / 50 * 1e3, rel=0.02)
    assert values["best_bytes"] == pytest.approx(sqrt(SIZE * SIZE / 50 * 2.0), rel=0.02)
    # 2·sqrt(s·o/w)
    assert values["best_added_ms"] == pytest.approx(2 * sqrt(50 * 2.0), rel=0.02)
    assert values["residual"] < 0.02
    assert finding.tone == "info"
    assert finding.conclusion.startswith("By s/(w·n) + n·o buckets of 10")


def test_at_most_all_gradients_are_in_a_bucket() -> None:
    """With an overhead above s/w the least time is that of one collective."""
    finding = coded(find_study("ddp").view([on_link(overhead_ms=80.0)]), "ddp.buckets")
    assert finding.values["best_bytes"] == SIZE
    assert "a single bucket add" in finding.conclusion


def test_a_poor_fit_has_no_best_size() -> None:
    finding = coded(find_study("ddp").view([on_link(slow=4.0)]), "ddp.buckets")
    assert finding.values["best_bytes"] is None
    assert float(str(finding.values["residual"])) > 0.25
    assert (finding.tone, finding.conclusion) == ("warn", "")


def test_an_overhead_that_is_not_shown_has_no_best_size() -> None:
    finding = coded(find_study("ddp").view([on_link(overhead_ms=0.0)]), "ddp.buckets")
    assert finding.values["best_bytes"] is None
    assert (finding.tone, finding.conclusion) == ("warn", "")


def test_a_record_that_is_not_trusted_has_no_best_size() -> None:
    record = on_link()
    busy = msgspec.structs.replace(
        record,
        series=tuple(
            msgspec.structs.replace(
                one, values=tuple(v * (9 if i % 2 else 1) for i, v in enumerate(one.values))
            )
            if one.variant == "no communication"
            else one
            for one in record.series
        ),
    )
    study = find_study("ddp")
    shown = tempered(study.view([busy]), [busy])
    assert coded(shown, "ddp.buckets").conclusion == ""


def test_points_are_beside_the_curve() -> None:
    blocks = find_study("ddp").view([on_link()])
    figure = next(one for name, one in figures_of(blocks).items() if "buckets" in name)
    model, measured = figure.curves
    assert list(measured.x) == [SIZE / count for count in (40, 30, 10, 1)]
    assert min(model.x) == pytest.approx(SIZE / 40)
    assert max(model.x) == pytest.approx(SIZE)
    rows = {row["strategy"]: row for row in rows_of(table_of(blocks, "ddp-buckets"))}
    assert list(rows) == ["flat", "bucketed 10 MiB", "bucketed 1 MiB", "overlap"]
    assert rows["bucketed 10 MiB"]["fit"] == pytest.approx(70.0, rel=0.02)
    assert rows["bucketed 10 MiB"]["model"] == pytest.approx(25.0, rel=0.02)
    assert rows["bucketed 10 MiB"]["exposed"].value == pytest.approx(20.0, rel=0.1)


def test_one_rank_has_no_model() -> None:
    assert "ddp.buckets" not in codes(find_study("ddp").view([on_link(ranks=1)]))
