"""`stepscope rehearse`: predictions from a stored recording, and one line for invalid options."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rehearsal_records import check_record, recorded_record
from sample_records import record, run
from stepscope.cli import main
from stepscope.records.jsonl import write_records
from stepscope.records.store import Store


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "recorded.jsonl"
    write_records([recorded_record(), check_record()], path)
    return path


def rehearse(folder: Path, *words: str) -> int:
    return main(["rehearse", *words, "--out", str(folder / "out")])


def rehearsal_json(
    folder: Path, capsys: pytest.CaptureFixture[str], *words: str
) -> dict[str, object]:
    assert rehearse(folder, *words, "--json") == 0
    (facts,) = json.loads(capsys.readouterr().out)["rehearsals"]
    assert isinstance(facts, dict)
    return facts


def test_it_prints_findings_and_tables_and_writes_a_page(
    tmp_path: Path, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert rehearse(tmp_path, str(file), "--ranks", "64", "--full") == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "on 64 ranks over infiniband, predicted: " in output
    page = (tmp_path / "out" / "rehearsal.html").read_text()
    assert "Predicted overlap on 64 ranks" in page
    assert page.count("<svg") == 5  # the bar of the verdict, and four figures


def test_json_has_every_prediction(
    tmp_path: Path, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = rehearsal_json(tmp_path, capsys, str(file), "--ranks", "8", "64", "--link", "ethernet")
    predictions = facts["predictions"]
    assert isinstance(predictions, list)
    assert [(p["link"], p["ranks"]) for p in predictions] == [("ethernet", 8), ("ethernet", 64)]
    strategies = predictions[1]["strategies"]
    assert strategies["naive"]["step_ms"] > strategies["bucketed"]["step_ms"]
    assert predictions[1]["bucket_step_ms"][f"{predictions[1]['best_bucket_mb']:g}"] == min(
        predictions[1]["bucket_step_ms"].values()
    )
    assert facts["compute_ms"] == 100.0


def test_custom_interconnect(
    tmp_path: Path, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--ranks", "2", "--latency-us", "0", "--bandwidth-gbs", "1", "--strategy", "flat")
    facts = rehearsal_json(tmp_path, capsys, str(file), *words)
    (prediction,) = facts["predictions"]  # type: ignore[misc]
    assert prediction["link"] == "1 GB/s, 0 µs"
    # 6 MiB at 1 GB/s between two ranks, and packing at 4 TB/s.
    expected = 6 * 2**20 / 1e6 + 6 * 2**20 * 2 / 4e9
    assert prediction["strategies"]["flat"]["exposed_ms"] == pytest.approx(expected)


def test_another_batch_and_another_device(
    tmp_path: Path, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = rehearsal_json(
        tmp_path, capsys, str(file), "--ranks", "8", "--batch", "8", "--faster", "2"
    )
    # Passes of 90 ms twice as long at half the time, and half of the optimizer's 10 ms.
    assert facts["compute_ms"] == pytest.approx(95.0)
    assert facts["batch"] == 8
    assert facts["flops_per_s"] == pytest.approx(2e14)


def test_newest_recording_of_the_store_is_the_default(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    with Store(tmp_path / "out" / "records.db") as store:
        store.add_run(run())
        for record in (recorded_record(), recorded_record(context=256)):
            store.add(record)
    assert (
        rehearsal_json(tmp_path, capsys, "--ranks", "8")["case"]
        == recorded_record(context=256).case
    )
    named = rehearsal_json(tmp_path, capsys, recorded_record().id, "--ranks", "8")
    assert named["case"] == recorded_record().case


def test_without_a_recording_prints_how_to_make_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert rehearse(tmp_path) == 2
    assert "there is no record store" in capsys.readouterr().err
    other = tmp_path / "other.jsonl"
    write_records([record(), recorded_record(status="oom", reason="OutOfMemoryError")], other)
    assert rehearse(tmp_path, str(other)) == 2
    output = capsys.readouterr().err
    assert "has no recorded step (record your own with `stepscope inspect train.py`" in output
    assert "`stepscope run rehearsal --size small --context 512`" in output


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--ranks", "0"], "ranks is 0"),
        (["--ranks", "-8"], "ranks is -8"),
        (["--bucket-mb", "0"], "bucket_mb is 0"),
        (["--bucket-mb", "nan"], "bucket_mb is nan"),
        (["--link", "infinyband"], "perhaps you meant infiniband"),
        (["--strategy", "zero"], "strategy 'zero' does not exist"),
        (["--latency-us", "5"], "needs two numbers"),
        (["--latency-us", "5", "--bandwidth-gbs", "0"], "bandwidth_gbs is 0"),
        (["--latency-us", "5", "--bandwidth-gbs", "1", "--per-node", "0"], "per_node is 0"),
        (["--faster", "0"], "faster is 0"),
        (["--batch", "-1"], "batch is -1"),
        (["--exposed-above", "0"], "exposed_above is 0"),
    ],
)
def test_invalid_options_give_one_line_and_exit_code_2(
    tmp_path: Path, file: Path, words: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert rehearse(tmp_path, str(file), *words) == 2
    output = capsys.readouterr().err
    assert expected in output
    assert len(output.strip().splitlines()) == 1
    assert not (tmp_path / "out" / "rehearsal.html").exists()


def test_it_does_not_load_torch(tmp_path: Path, file: Path) -> None:
    code = (
        "import sys; from stepscope.cli import main;"
        f"main(['rehearse', {str(file)!r}, '--ranks', '8', '--out', {str(tmp_path)!r}]);"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
