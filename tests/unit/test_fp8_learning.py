"""The learning benchmark of FP8: interrupted and resumed here, and its section of the docs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from fp8_on_cpu import pretend_fp8
from stepscope.model.config import ModelConfig

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "scripts")]

import fp8_learning  # noqa: E402
import fp8_page  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
SHAPE = ModelConfig(d_model=32, d_ff=64, n_layers=1, n_heads=2, vocab=256, context=16)


@pytest.fixture(autouse=True)
def _in_plain_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the kernels, which take seconds for each step in Triton's interpreter."""
    for module in ("kernels.launch", "optim.launches"):
        monkeypatch.setattr(f"stepscope.{module}.is_interpreted", lambda: False)


def test_trainings_go_on_after_a_time_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_fp8(monkeypatch)
    monkeypatch.setattr(fp8_learning, "unavailable", lambda *_: None)
    monkeypatch.setitem(fp8_learning.MODELS, "tiny", fp8_learning.Training(SHAPE, 1, 16, 3, 1e-3))
    out = tmp_path / "learning.jsonl"
    words = ["--models", "tiny", "--seeds", "1", "--device", "cpu", "--out", str(out)]
    assert fp8_learning.main([*words, "--time-limit", "0"]) == 3
    (checkpoint,) = tmp_path.glob("*.pt")
    assert not out.exists()
    assert fp8_learning.main([*words, "--resume"]) == 0
    bf16, fp8 = fp8_learning.read(out)
    assert not checkpoint.exists()
    assert (bf16["dtype"], fp8["dtype"]) == ("bf16", "fp8")
    assert len(bf16["losses"]) == len(fp8["losses"]) == 3
    assert fp8["losses"][0] == pytest.approx(bf16["losses"][0], rel=0.05)
    assert (bf16["fp8_weights"], fp8["fp8_weights"]) == (0, 7)
    assert fp8["left_out"] == {}
    # Nothing is left to train, and a file is not overwritten.
    assert fp8_learning.main([*words, "--resume"]) == 0
    assert fp8_learning.main(words) == 2
    assert len(fp8_learning.read(out)) == 2


def test_without_fp8_nothing_is_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "learning.jsonl"
    assert fp8_learning.main(["--device", "cpu", "--out", str(out)]) == 2
    assert "FP8 GEMMs need an NVIDIA GPU" in capsys.readouterr().out
    assert not out.exists()


def test_a_resumed_training_continues_its_losses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(fp8_learning.MODELS, "tiny", fp8_learning.Training(SHAPE, 1, 16, 4, 1e-3))

    def run() -> fp8_learning.Run:
        device = fp8_learning.pick_device("cpu").torch_device
        return fp8_learning.Run("tiny", "bf16", 0, fp8_learning.Recipe(), device)

    full, first = run(), run()
    full.train(float("inf"), tmp_path / "full.pt")
    for _ in range(2):
        first.losses.append(float(first._step(len(first.losses))))
    first.save(tmp_path / "first.pt")
    second = run()
    second.load(tmp_path / "first.pt")
    second.train(float("inf"), tmp_path / "second.pt")
    assert second.losses == pytest.approx(full.losses, rel=1e-5)


def line(dtype: str, seed: int, last: float, **changes: Any) -> str:
    return json.dumps(
        {
            "model": "small",
            "dtype": dtype,
            "seed": seed,
            "recipe": "tensorwise",
            "parameters": 1000,
            "fp8_weights": 7,
            "steps": 200,
            "diverged_at": None,
            "losses": [5.0] * 100 + [last] * 100,
            "device": "NVIDIA H200",
            "torch": "2.11.0",
            "commit": "abcdef0123456789",
        }
        | changes
    )


def section(folder: Path, *lines: str) -> tuple[str, dict[str, str]]:
    (folder / fp8_page.FILE).write_text("\n".join(lines) + "\n")
    paragraphs, figures = fp8_page.learning_part(folder)
    return "\n".join(paragraphs), figures


def test_the_docs_have_a_table_and_a_figure_of_pairs(tmp_path: Path) -> None:
    assert fp8_page.learning_part(tmp_path) == ([], {})
    text, figures = section(
        tmp_path,
        line("bf16", 0, 1.0),
        line("fp8", 0, 1.004),
        line("bf16", 1, 1.02),
        line("fp8", 1, 1.02),
        line("bf16", 2, 1.0),
        line("fp8-auto", 2, 1.1, fp8_weights=3),
    )
    names = ("small", "small-change", "small-auto", "small-auto-change")
    assert set(figures) == {f"figures/fp8-learning-{name}.svg" for name in names}
    rows = [row for row in text.splitlines() if row.startswith("| small")]
    every, by_rule = ([cell.strip() for cell in row.strip("|").split("|")] for row in rows)
    assert every[:6] == ["small", "all: 7 weights", "tensorwise", "1,000", "200", "2"]
    assert every[-2:] == ["0", "yes"]
    assert by_rule[:6] == ["small", "by the rule: 3 weights", "tensorwise", "1,000", "200", "1"]
    assert by_rule[-2:] == ["0", "no"]


@pytest.mark.parametrize(
    ("bf16", "fp8", "same"), [(1.0, 1.02, False), (1.0, 0.98, False), (1.0, 1.003, True)]
)
def test_another_loss_is_not_the_same(bf16: float, fp8: float, same: bool) -> None:
    pairs = [json.loads(line("bf16", 0, bf16)), json.loads(line("fp8", 0, fp8))]
    (one,) = fp8_page.learned(pairs)
    assert one.same is same


def test_divergence_is_not_the_same() -> None:
    pairs = [
        json.loads(line("bf16", 0, 1.0)),
        json.loads(line("fp8", 0, 1.0, diverged_at=120, losses=[5.0] * 119)),
    ]
    (one,) = fp8_page.learned(pairs)
    assert (one.same, one.change, one.diverged) == (False, None, 1)


def test_the_docs_compare_steps_within_a_process(tmp_path: Path) -> None:
    assert fp8_page.step_part(tmp_path) == []
    blocks = [
        {"form": "fp8-tensorwise", "block": 0, "median_ms": 50.0, "policy": "all", "joules": 35.0},
        {"form": "torchao-tensorwise", "block": 1, "median_ms": 60.0},
        {"form": "torchao-tensorwise", "block": 2, "median_ms": 64.0, "joules": 41.0},
        {"form": "compiled", "block": 3, "skipped": "no memory"},
        {"form": "fp8-tensorwise", "block": 0, "median_ms": 40.0, "policy": "inputs"},
    ]
    common = {"row": "own_xl", "peak_gib": 3.0, "device": "H", "torch": "2", "commit": "abc"}
    text = "\n".join(json.dumps(common | block) for block in blocks)
    (tmp_path / fp8_page.STEPS).write_text(text)
    found = [
        (one.form, one.policy, one.ms, one.peer, one.joules)
        for one in fp8_page.steps_of([common | block for block in blocks])
    ]
    assert found == [
        ("fp8-tensorwise", "all", 50.0, (62.0, "torchao-tensorwise"), 35.0),
        ("torchao-tensorwise", "", 62.0, (62.0, "torchao-tensorwise"), 41.0),
        ("fp8-tensorwise", "inputs", 40.0, None, None),
    ]
    page = "\n".join(fp8_page.step_part(tmp_path))
    assert "| TransformerLM xl | fp8-tensorwise | all | 50.00 | 1.24" in page
