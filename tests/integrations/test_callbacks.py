"""Callbacks in the trainers of other libraries: what they record, log and leave unchanged."""

from __future__ import annotations

import csv
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from stepscope.advisor.scope.library import Scope
from stepscope.analysis.observed.lines import read_folder
from stepscope.records.jsonl import read_records
from stepscope.views.program.rows import ProgramRecord

ROOT = Path(__file__).parents[2]

transformers = pytest.importorskip("transformers")
lightning = pytest.importorskip("lightning")
accelerate = pytest.importorskip("accelerate")

from accelerate.tracking import GeneralTracker, on_main_process  # noqa: E402
from lightning.pytorch.loggers import CSVLogger  # noqa: E402
from transformers.integrations import TensorBoardCallback  # noqa: E402

from stepscope.integrations import (  # noqa: E402
    StepscopeAccelerateHook,
    StepscopeCallback,
    StepscopeLightningCallback,
)

FEW: dict[str, Any] = {"warmup": 1, "steps": 3, "traced": 1}
VOCAB, LENGTH, BATCH = 50, 8, 4
IDS = torch.randint(VOCAB, (256, LENGTH), generator=torch.Generator().manual_seed(0))
LOGGED = {
    "stepscope/step_ms",
    "stepscope/tokens_per_second",
    "stepscope/exposed_communication_ms",
    "stepscope/peak_memory_bytes",
}


def gpt2() -> Any:
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=VOCAB,
            n_positions=LENGTH,
            n_embd=16,
            n_layer=1,
            n_head=2,
            bos_token_id=0,
            eos_token_id=0,
            use_cache=False,
        )
    )


class Ids(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return len(IDS)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": IDS[index], "labels": IDS[index]}


class Reporter(TensorBoardCallback):  # type: ignore[misc]
    """A reporting integration of transformers that keeps what it is given."""

    def __init__(self) -> None:
        self.logged: list[dict[str, float]] = []

    def on_train_begin(self, *_: Any, **__: Any) -> None: ...

    def on_train_end(self, *_: Any, **__: Any) -> None: ...

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        del args, state, control
        self.logged.append(logs)


class NeedsLoss(transformers.TrainerCallback):  # type: ignore[misc]
    """A callback of the program that expects a loss in every log."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        del args, state, control
        assert {"loss", "train_loss"} & logs.keys()


def train_hf(folder: Path, *callbacks: Any, steps: int = 10, accumulate: int = 1) -> list[float]:
    trainer = transformers.Trainer(
        model=gpt2(),
        args=transformers.TrainingArguments(
            output_dir=str(folder),
            max_steps=steps,
            per_device_train_batch_size=BATCH,
            gradient_accumulation_steps=accumulate,
            use_cpu=True,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=Ids(),
        callbacks=list(callbacks),
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_trainer_records_logs_and_trains_as_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = train_hf(tmp_path, accumulate=2)
    capsys.readouterr()
    page, reporter = tmp_path / "deep" / "page.html", Reporter()
    callback = StepscopeCallback(**FEW, page=page)
    losses = train_hf(tmp_path, reporter, NeedsLoss(), callback, accumulate=2)
    assert losses == plain
    record = callback.record
    assert record is not None
    assert ProgramRecord(record).micro_batches == 2
    assert record.quantity("tokens") == 2 * BATCH * LENGTH
    assert [len(series.values) for series in record.series if series.name == "step"] == [3]
    (metrics,) = [logs for logs in reporter.logged if not {"loss", "train_loss"} & logs.keys()]
    assert metrics == callback.metrics
    assert metrics.keys() >= LOGGED
    assert metrics["stepscope/exposed_communication_ms"] == 0.0
    assert read_records(page.with_suffix(".jsonl"))[0].id == record.id
    assert callback.verdict is not None
    captured = capsys.readouterr()
    assert "stepscope" not in captured.out
    assert "A step takes" in captured.err
    assert f"page: {page}" in captured.err


def test_all_steps_are_observed_and_logged(tmp_path: Path) -> None:
    plain = train_hf(tmp_path, steps=24)
    reporter = Reporter()
    callback = StepscopeCallback(**FEW, page=tmp_path / "page.html", observe=True)
    assert train_hf(tmp_path, reporter, callback, steps=24) == plain
    logged = [logs for logs in reporter.logged if "stepscope/loader_ms" in logs]
    assert len(logged) == 2
    (rank,) = read_folder(tmp_path / "observer")
    assert [line.step for line in rank.steps] == [10, 20, 24]
    assert logged[0]["stepscope/step_ms"] == rank.steps[0].step_ms
    assert callback.record is not None
    csv_logger = CSVLogger(tmp_path, flush_logs_every_n_steps=1)
    lightning_callback = StepscopeLightningCallback(
        **FEW, page=tmp_path / "lightning" / "page.html", observe=True
    )
    train_lightning(tmp_path, lightning_callback, logger=csv_logger)
    assert lightning_callback.observer is not None
    (rank,) = read_folder(tmp_path / "lightning" / "observer")
    assert rank.steps[-1].step >= 8


def test_trainer_continues_after_an_error_in_the_callback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: Scope) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(Scope, "next_step", fail)
    callback = StepscopeCallback(**FEW, page=tmp_path / "page.html")
    assert len(train_hf(tmp_path, callback, steps=3)) == 3
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("stepscope")]
    assert lines == ["stepscope: the recording ended, training continues: RuntimeError: planted"]


def test_short_training_says_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train_hf(tmp_path, StepscopeCallback(page=tmp_path / "page.html"), steps=2)
    assert "training continues: 1 step ran, but the recording needs 20" in capsys.readouterr().err


class LanguageModel(lightning.LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.model = gpt2()
        self.losses: list[float] = []

    def training_step(self, batch: tuple[Tensor], index: int) -> Tensor:
        del index
        loss: Tensor = self.model(input_ids=batch[0], labels=batch[0]).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def train_lightning(folder: Path, *callbacks: Any, logger: Any = False) -> list[float]:
    model = LanguageModel()
    lightning.seed_everything(0, verbose=False)
    trainer = lightning.Trainer(
        default_root_dir=folder,
        max_steps=10,
        accelerator="cpu",
        devices=1,
        logger=logger,
        accumulate_grad_batches=2,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        callbacks=list(callbacks),
    )
    trainer.fit(model, DataLoader(TensorDataset(IDS), BATCH))
    return model.losses


def test_lightning_records_logs_and_trains_as_before(tmp_path: Path) -> None:
    plain = train_lightning(tmp_path)
    callback = StepscopeLightningCallback(**FEW, page=tmp_path / "page.html")
    logger = CSVLogger(tmp_path, name="logs", version=0)
    assert train_lightning(tmp_path, callback, logger=logger) == plain
    assert callback.record is not None
    assert ProgramRecord(callback.record).micro_batches == 2
    with (tmp_path / "logs" / "version_0" / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["stepscope/step_ms"]]
    assert len(rows) == 1
    assert {name: float(rows[0][name]) for name in callback.metrics} == callback.metrics
    assert callback.metrics.keys() >= LOGGED


class Tracker(GeneralTracker):  # type: ignore[misc]
    """A tracker of Accelerate that keeps what it is given."""

    name = "kept"
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[tuple[dict[str, float], int]] = []

    @property
    def tracker(self) -> None:
        return None

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None: ...

    @on_main_process
    def log(self, values: dict[str, float], step: int, **_: Any) -> None:
        self.logged.append((values, step))


def train_accelerate(folder: Path, *, recorded: bool, **options: Any) -> tuple[list[float], Any]:
    tracker = Tracker()
    accelerator = accelerate.Accelerator(
        cpu=True, gradient_accumulation_steps=2, log_with=tracker, project_dir=str(folder)
    )
    accelerator.init_trackers("test")
    model = gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(TensorDataset(IDS), BATCH)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    hook = StepscopeAccelerateHook(
        accelerator, model, optimizer, **FEW, page=folder / "page.html", **options
    ) if recorded else None  # fmt: skip
    torch.manual_seed(0)
    losses = []
    for index, (ids,) in enumerate(loader):
        with accelerator.accumulate(model):
            loss = model(input_ids=ids, labels=ids).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        if index == 19:
            break
    if hook is not None:
        hook.close()
    return losses, (hook, tracker)


def test_loop_of_accelerate_records_logs_and_trains_as_before(tmp_path: Path) -> None:
    plain, _ = train_accelerate(tmp_path, recorded=False)
    losses, (hook, tracker) = train_accelerate(tmp_path, recorded=True)
    assert losses == plain
    assert ProgramRecord(hook.record).micro_batches == 2
    assert tracker.logged == [(hook.metrics, 8)]
    assert hook.metrics.keys() >= LOGGED


def test_acceleration_is_applied_while_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, _ = train_accelerate(tmp_path, recorded=False)
    losses, (hook, _) = train_accelerate(tmp_path, recorded=True, accelerate=True)
    assert "accelerated GPT2LMHeadModel:" in capsys.readouterr().err
    assert losses == pytest.approx(plain, rel=1e-3)
    assert hook.acceleration is None
    assert hook.record is not None


def test_importing_stepscope_imports_no_other_library() -> None:
    code = "import sys, stepscope, stepscope.integrations; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    others = {"accelerate", "lightning", "torch", "transformers"}
    assert not others & set(done.stdout.split())


@pytest.mark.parametrize("name", ["hf", "lightning", "accelerate"])
def test_an_example_writes_its_page(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    path = ROOT / "examples" / f"callbacks_{name}.py"
    monkeypatch.setattr("sys.argv", [str(path), "--steps", "22"])
    runpy.run_path(str(path), run_name="__main__")
    captured = capsys.readouterr()
    assert "loss" in captured.out
    assert captured.err.count("A step takes") == 1
    assert (tmp_path / "stepscope-out" / "trainer.html").stat().st_size > 10_000
