"""The rehearsal study: cases, predictions from given recordings, and checks on real ranks."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from rehearsal_records import ready_times, recorded_record
from stepscope.analysis.rehearsal.recording import NOTE, Recording, recording_of
from stepscope.errors import StepscopeError, UsageError
from stepscope.records.schema import Record
from stepscope.report.blocks import Finding, Table, Timeline
from stepscope.studies.registry import find_study
from stepscope.studies.rehearsal import subject
from view_blocks import figures_of, findings_of, table_of


def view(*records: Record) -> tuple[Any, ...]:
    return find_study("rehearsal").view(records)


def findings(*records: Record) -> list[Finding]:
    return findings_of(view(*records))


def of_code(code: str, *records: Record) -> list[Finding]:
    return findings_of(view(*records), code)


def subject_of(record: Record) -> subject.Subject | None:
    (result,) = find_study("rehearsal").results([record])
    return subject.subject_of(*result)


def table(name: str, *records: Record) -> Table:
    return table_of(view(*records), name)


def test_a_recording_has_the_medians_of_its_record() -> None:
    recording = recording_of(recorded_record())
    assert recording is not None
    assert (recording.forward_ms, recording.backward_ms, recording.optimizer_ms) == (
        30.0,
        60.0,
        10.0,
    )
    assert [gradient.ready for gradient in recording.gradients] == [
        60.0,
        50.0,
        40.0,
        30.0,
        20.0,
        10.0,
    ]
    assert recording.order == [5, 4, 3, 2, 1, 0]
    assert recording.gradient_bytes == 6 * 2**20
    assert recording.half_ready() == 0.5


def test_scaling_by_batch_and_by_device_speed() -> None:
    recording = recording_of(recorded_record())
    assert recording is not None
    twice, fast = recording.with_batch(2.0), recording.on_faster_device(10.0)
    assert (twice.forward_ms, twice.backward_ms, twice.optimizer_ms) == (60.0, 120.0, 10.0)
    assert twice.gradients[0].ready == 120.0
    assert fast.compute_ms == pytest.approx(10.0)
    assert fast.gradients[0].ready == pytest.approx(6.0)


def test_the_backward_lasts_until_the_last_gradient() -> None:
    late = (msgspec.structs.replace(ready_times()[0], ready_ms=(70.0,)),)
    recording = recording_of(recorded_record(attachments={NOTE: msgspec.to_builtins(late)}))
    assert recording is not None
    assert recording.backward_ms == 70.0


def test_a_recording_without_gradients_is_rejected() -> None:
    with pytest.raises(StepscopeError, match="no gradient"):
        recording_of(recorded_record(attachments={NOTE: []}))
    assert recording_of(recorded_record(attachments={})) is None
    assert recording_of(recorded_record(status="oom")) is None


NEVER_READY = msgspec.to_builtins([msgspec.structs.replace(ready_times()[0], ready_ms=())])


@pytest.mark.parametrize("attached", ["{", [{"name": 1}], NEVER_READY])
def test_a_damaged_recording_is_reported(attached: object) -> None:
    with pytest.raises(StepscopeError, match=r"record run-1-rehearsal.* has no complete recording"):
        recording_of(recorded_record(attachments={NOTE: attached}))
    phases = recorded_record().series[:2]
    with pytest.raises(StepscopeError, match="has no complete recording"):
        recording_of(recorded_record(series=phases))


def test_an_old_record_without_a_field_is_read() -> None:
    record = recorded_record()
    old = {name: value for name, value in record.config.items() if name != "overrides"}
    assert subject_of(msgspec.structs.replace(record, config=old)) == subject_of(record)


def test_device_rate_and_packing_come_from_the_record() -> None:
    rehearsed = subject_of(recorded_record())
    assert rehearsed is not None
    assert rehearsed.flops_per_s == pytest.approx(9e12 / 90e-3)
    # A copy bandwidth of 4 TB/s; a byte is read and written.
    assert rehearsed.upkeep.pack_byte == pytest.approx(2 / 4e9)


LINKS = ["nvlink", "infiniband", "ethernet"]


def most(link: object) -> int:
    """The most of 8, 64 and 1024 ranks that the link connects."""
    return 64 if link == "nvlink" else 1024


def test_the_recorded_step_is_reported() -> None:
    record = recorded_record()
    (match,) = of_code("rehearsal.recorded", record)
    assert match.records == (record.id,)
    assert (match.values["compute_ms"], match.values["backward_ms"]) == (100.0, 60.0)
    assert match.values["half_ready"] == 0.5
    assert match.sentence == (
        "small at context 128 in bfloat16: recorded on NVIDIA H200, a step computes for 100 ms"
        " (60.0 ms of it backward, at 100 TFLOP/s) and has 6.00 MiB of gradients, half of which"
        " are ready after 50.0 % of the backward pass."
    )


def test_the_best_bucket_size_is_reported_for_every_link() -> None:
    record = recorded_record()
    matches = of_code("rehearsal.best-bucket", record)
    assert [match.values["link"] for match in matches] == LINKS
    for match in matches:
        assert match.records == (record.id,)
        ranks = most(match.values["link"])
        assert match.values["ranks"] == ranks
        assert match.values["step_ms"] == pytest.approx(100.0 + match.values["exposed_ms"])  # type: ignore[operator]
        cluster = f"{ranks:,} ranks over {match.values['link']}"
        assert f"on {cluster}, predicted: 10" in match.text
        assert " Other strategies: naive " in match.text
        assert match.conclusion.startswith("The best bucket size is ")


def test_an_nvlink_domain_that_does_not_exist_is_not_predicted() -> None:
    (match,) = of_code("rehearsal.no-such-domain", recorded_record())
    assert match.values == {"ranks": 1024, "largest": 72}
    assert match.text == (
        "No prediction for 1,024 ranks over nvlink: the largest domain has 72 GPUs."
    )
    only = recorded_record()
    config = {**only.config, "link": ["nvlink"], "ranks": [1024]}
    found = findings(msgspec.structs.replace(only, config=config))
    assert [one.code for one in found] == ["rehearsal.recorded", "rehearsal.no-such-domain"]


def test_the_limit_of_scaling_is_reported_for_every_link() -> None:
    record = recorded_record()
    matches = of_code("rehearsal.scaling", record)
    assert [match.values["link"] for match in matches] == LINKS
    for match in matches:
        assert match.records == (record.id,)
        assert (match.values["stops_paying_at"], match.tone) == (None, "info")
        assert match.values["exposed_share"] < 0.2  # type: ignore[operator]
        assert (
            f"They take at most 20.0 % of the step up to {most(match.values['link']):,} ranks."
            " The same batch divided among ranks is fastest on " in match.conclusion
        )


def test_the_table_has_every_strategy_on_every_cluster() -> None:
    rows = table("rehearsal-steps", recorded_record()).rows
    assert len(rows) == (3 * 3 - 1) * 6
    assert not any(row[:2] == ("nvlink", 1024) for row in rows)
    steps = {(row[0], row[1], row[2]): row[4] for row in rows}
    ethernet = {name: steps["ethernet", 1024, name] for name in ("naive", "overlap", "bucketed")}
    assert ethernet["bucketed"] <= ethernet["overlap"] < ethernet["naive"]
    # The sharded optimizer updates only a share of the parameters.
    assert steps["nvlink", 8, "sharded"] < 100.0
    named = table("rehearsal-steps", recorded_record(), recorded_record(context=256))
    assert named.columns[0].title == "step of"


def test_figures_show_overlap_ranks_and_buckets() -> None:
    shown = view(recorded_record())
    timeline = next(block for block in shown if isinstance(block, Timeline))
    lanes = {lane.label: lane for lane in timeline.lanes}
    assert [s.label for s in lanes["naive: compute"].spans] == [
        "forward",
        "backward",
        "waiting",
        "optimizer",
    ]
    assert len(lanes["naive: links"].spans) == 6
    backward = lanes["overlap: compute"].spans[1]
    assert lanes["overlap: links"].spans[0].start < backward.end
    assert lanes["naive: links"].spans[0].start >= lanes["naive: compute"].spans[1].end
    figures = {name.split("-tiny")[0]: figure for name, figure in figures_of(shown).items()}
    kinds = [name.removesuffix(f"-{recorded_record().case}") for name in figures]
    assert kinds == ["rehearsal-ranks-kept", "rehearsal-ranks-divided", "rehearsal-buckets"]
    assert {curve.label for figure in figures.values() for curve in figure.curves} >= {
        "nvlink",
        "infiniband",
        "1,024 ranks over ethernet",
    }


def test_a_batch_of_one_is_not_divided() -> None:
    record = recorded_record(batch=1)
    for match in of_code("rehearsal.scaling", record):
        assert match.values["fastest_shared"] is None
        assert "divided among ranks" not in match.sentence
    assert not any("divided" in name for name in figures_of(view(record)))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ranks": (0,)}, "ranks is 0"),
        ({"link": ("infinyband",)}, "link 'infinyband' does not exist"),
        ({"ranks": ()}, "no cluster to predict"),
        ({"steps": 0}, "steps is 0"),
    ],
)
def test_invalid_flags_are_rejected(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        find_study("rehearsal").flags(**options)


def test_a_recording_from_samples() -> None:
    recording = Recording.of_samples(recorded_record().series, ready_times())
    assert recording.compute_ms == 100.0


def test_a_failed_case_is_in_the_table_of_failed_cases() -> None:
    failed = recorded_record(status="error", reason="no network")
    assert table("rehearsal-lost", failed).rows == ((failed.case, "error", "no network"),)
