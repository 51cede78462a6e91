"""Callbacks of trainers, and the live view of a script, on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from stepscope.integrations.trainer_recording import TrainerRecording
from stepscope.views.program.rows import ProgramRecord

KIND = "cuda"
FEW: dict[str, Any] = {"warmup": 2, "steps": 4, "traced": 2}
STEPS = 20
VOCAB, LENGTH, BATCH = 500, 64, 4
IDS = torch.randint(VOCAB, (STEPS * BATCH, LENGTH), generator=torch.Generator().manual_seed(0))


class LanguageModel(torch.nn.Module):
    """A model whose gradients do not depend on the order of atomic additions."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(VOCAB, 128)
        self.down = torch.nn.Linear(128, VOCAB)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        tokens = torch.nn.functional.one_hot(input_ids, VOCAB).float()
        logits = self.down(torch.nn.functional.gelu(self.up(tokens)))
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


def model() -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel()


def assert_recorded(callback: TrainerRecording) -> None:
    record = callback.record
    assert record is not None
    assert record.environment.device_kind == KIND
    watched = ProgramRecord(record)
    assert watched.summary is not None, watched.missing
    assert watched.summary.on_device
    assert {"forward", "backward", "optimizer"} <= {use.phase for use in watched.summary.uses}
    assert record.quantity("tokens") == BATCH * LENGTH
    metrics = callback.metrics
    assert metrics["stepscope/step_ms"] > 0
    assert metrics["stepscope/exposed_communication_ms"] == 0.0
    # At least weights, gradients and moments of the optimizer.
    weights = 4 * sum(p.numel() for p in LanguageModel().parameters())
    assert metrics["stepscope/peak_memory_bytes"] > 3 * weights
    assert callback.verdict is not None
    assert callback.verdict.parts


def test_callback_of_the_hugging_face_trainer(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from stepscope.integrations import StepscopeCallback

    class Ids(torch.utils.data.Dataset[dict[str, Tensor]]):
        def __len__(self) -> int:
            return len(IDS)

        def __getitem__(self, index: int) -> dict[str, Tensor]:
            return {"input_ids": IDS[index], "labels": IDS[index]}

    def losses(*callbacks: Any) -> list[float]:
        trainer = transformers.Trainer(
            model=model(),
            args=transformers.TrainingArguments(
                output_dir=str(tmp_path),
                max_steps=STEPS,
                per_device_train_batch_size=BATCH,
                use_cpu=KIND == "cpu",
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

    callback = StepscopeCallback(**FEW, page=tmp_path / "page.html")
    plain = losses()
    assert losses(callback) == plain
    assert_recorded(callback)
    assert (tmp_path / "page.html").exists()


def test_callback_of_lightning(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")
    from stepscope.integrations import StepscopeLightningCallback

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model, self.losses = model(), []

        def training_step(self, batch: tuple[Tensor], index: int) -> Tensor:
            del index
            loss: Tensor = self.model(batch[0], batch[0])["loss"]
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def losses(*callbacks: Any) -> list[float]:
        module = Module()
        trainer = lightning.Trainer(
            default_root_dir=tmp_path,
            max_steps=STEPS,
            accelerator="cpu" if KIND == "cpu" else "gpu",
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=list(callbacks),
        )
        trainer.fit(module, DataLoader(TensorDataset(IDS), BATCH))
        return module.losses

    callback = StepscopeLightningCallback(**FEW, page=tmp_path / "page.html")
    plain = losses()
    assert losses(callback) == plain
    assert_recorded(callback)


SCRIPT = """
import sys, time
from pathlib import Path
import torch
model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8))).cuda()
optimizer = torch.optim.AdamW(model.parameters())
x = torch.randn(64, 512, device="cuda")
while not Path(sys.argv[1]).exists():
    model(x).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.002)
print("ended by itself")
sys.exit(7)
"""
