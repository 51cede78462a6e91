"""The memory of any model's step, predicted on fake tensors."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import stepscope
from stepscope.analysis.predict.fit import MARGIN
from stepscope.analysis.predict.plan import StepPlan
from stepscope.analysis.predict.step import predict as closed_form
from stepscope.attention.api import attention_with
from stepscope.errors import UsageError
from stepscope.measure.ledger import StorageLedger
from stepscope.model import TransformerLM, find_size, with_overrides
from stepscope.planning.fake_run import MemoryPrediction
from stepscope.planning.fit import plans_of_step
from stepscope.planning.simulated_bytes import WORKSPACE
from stepscope.records.memory import (
    GRADIENTS,
    OPTIMIZER,
    PARAMETERS,
    ROUNDING,
    SAVED_KIND,
    WEIGHT_COPIES,
)

WIDTH, ROWS = 256, 512


def of_logits(model: nn.Module, batch: Any) -> Tensor:
    logits = model(batch[0])
    # As the loss of the built-in model: autocast alone would leave the cast to the kernel.
    return functional.cross_entropy(logits.float().flatten(0, -2), batch[1].flatten())


def square(model: nn.Module, batch: Any) -> Tensor:
    return model(batch).square().mean()


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), **options)


def predicted(model: nn.Module, **options: Any) -> MemoryPrediction:
    batch = torch.zeros(ROWS, WIDTH)
    return stepscope.predict(model, adamw(model), batch, loss_fn=square, **options)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_agrees_with_the_closed_form_of_the_built_in_model(dtype: str) -> None:
    """The closed form is within 0.1 % of the allocator's peaks on an H200."""
    config = with_overrides(
        find_size("tiny"), d_model=256, d_ff=1024, n_layers=2, n_heads=4, vocab=8192, context=256
    )
    plan = StepPlan(
        model=config, batch=8, context=256, dtype=dtype, attention="sdpa", optimizer="torch-fused"
    )
    with torch.device("meta"):
        model = TransformerLM(config, attention=attention_with("sdpa"))
    tokens = torch.zeros(8, 256, dtype=torch.long)
    prediction = stepscope.predict(
        model,
        adamw(model, fused=True),
        (tokens, tokens.clone()),
        loss_fn=of_logits,
        dtype=torch.bfloat16 if dtype == "bfloat16" else None,
    )
    # The step of the studies keeps its logits, in the dtype of the matmuls.
    logits = tokens.numel() * 8192 * (2 if dtype == "bfloat16" else 4)
    expected = closed_form(plan)
    peak, peak_expected = prediction.peak, expected.peak.allocated - logits
    assert peak.phase == expected.peak.phase == "backward"
    assert abs(peak.allocated - peak_expected) < 0.001 * peak_expected
    for line in (PARAMETERS, OPTIMIZER):
        assert prediction.kinds[line] == pytest.approx(expected.peak.lines[line], rel=0.02)


def test_a_loss_under_autocast_has_no_copy_of_the_logits_in_float32() -> None:
    """Its kernels read and write 16 bits; saved and their gradient in float32, as on an H200."""

    def peak(wide: bool) -> int:
        with torch.device("meta"):
            model = nn.Linear(8, 4096, bias=False)
        found = stepscope.predict(
            model,
            torch.optim.SGD(model.parameters()),
            (torch.zeros(1024, 8), torch.zeros(1024, dtype=torch.long)),
            loss_fn=lambda model, batch: functional.cross_entropy(
                model(batch[0]).float() if wide else model(batch[0]), batch[1]
            ),
            dtype=torch.bfloat16,
        )
        return found.peak.allocated

    assert peak(wide=True) - peak(wide=False) == pytest.approx(2 * 1024 * 4096, rel=0.01)


def test_counts_what_a_real_step_allocates() -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.LayerNorm(4 * WIDTH),
            nn.Linear(4 * WIDTH, WIDTH),
        )  # fmt: skip

    model, batch = build(), torch.randn(ROWS, WIDTH)
    optimizer = adamw(model, foreach=True)
    ledger = StorageLedger(torch.device("cpu"), None)
    ledger.count((batch,), "inputs")
    for _ in range(2):
        with ledger.watching(model, optimizer):
            ledger.begin("step")
            square(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            ledger.end()
    (real,) = ledger.peaks
    peak = predicted(build()).peak
    tensors = peak.allocated - WORKSPACE - peak.lines[ROUNDING]
    assert abs(tensors - real.allocated) < 0.01 * real.allocated
    assert peak.unattributed == 0


def test_the_model_stays_as_it_is() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
    optimizer = adamw(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    first = predicted(model)
    assert predicted(model) == first
    assert not optimizer.state
    assert all(parameter.grad is None for parameter in model.parameters())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_state_of_the_optimizer_is_counted_before_the_first_step() -> None:
    model = nn.Linear(WIDTH, WIDTH, bias=False)
    size = model.weight.nbytes
    kinds = predicted(model).phases[0].lines
    # Two moments, and the number of the step.
    assert kinds[OPTIMIZER] == pytest.approx(2 * size, rel=0.01)
    assert kinds[PARAMETERS] == size


def test_a_weight_that_is_used_twice_has_one_gradient_more_at_most() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(50_000, 64)

        def forward(self, tokens: Tensor) -> Tensor:
            return functional.linear(self.embedding(tokens), self.embedding.weight)

    model = Tied()
    tokens = torch.zeros(1, 4, dtype=torch.long)
    prediction = stepscope.predict(
        model, torch.optim.SGD(model.parameters()), (tokens, tokens), loss_fn=of_logits
    )
    size = model.embedding.weight.nbytes
    # Weight, the gradient of the head, and that of the embedding until it is added.
    assert 3 * size < prediction.peak.allocated - WORKSPACE < 3.2 * size


def test_dropout_saves_a_mask_of_one_byte_and_attention_none() -> None:
    class Model(nn.Module):
        def __init__(self, rate: float) -> None:
            super().__init__()
            self.block = nn.TransformerEncoderLayer(WIDTH, 4, WIDTH, dropout=rate, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.block(x)

    def saved(rate: float) -> int:
        model = Model(rate)
        batch = torch.zeros(4, 128, WIDTH)
        prediction = stepscope.predict(model, adamw(model), batch, loss_fn=square)
        return sum(
            size
            for line, size in prediction.phases[0].lines.items()
            if "dropout" in line or "attention" in line
        )

    elements = 4 * 128 * WIDTH
    # After attention, within the MLP, after it. Each also has an output of its own.
    masks = 3 * elements
    assert saved(0.1) - saved(0.0) <= masks + elements * 4


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_weights_are_cast_once(dtype: torch.dtype | None) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(self.linear(x))

    model = Twice()
    copies = predicted(model, dtype=dtype).phases[0].lines.get(WEIGHT_COPIES, 0)
    assert copies == (0 if dtype is None else model.linear.weight.nbytes // 2)


def test_checkpointed_blocks_save_their_inputs() -> None:
    class Blocks(nn.Module):
        def __init__(self, again: bool) -> None:
            super().__init__()
            self.again = again
            self.blocks = nn.ModuleList(
                nn.Sequential(
                    nn.Linear(WIDTH, 4 * WIDTH), nn.Dropout(), nn.Linear(4 * WIDTH, WIDTH)
                )
                for _ in range(4)
            )  # fmt: skip

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
            return x

    def saved(again: bool) -> int:
        lines = predicted(Blocks(again), dtype=torch.bfloat16).phases[0].lines
        return sum(size for line, size in lines.items() if line.startswith("saved"))

    assert saved(True) < 0.5 * saved(False)


class ReadsAMask(nn.Module):
    """Needs the scores only if the mask has padding, as decoders of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.linear(x)
        if not mask.all():
            x = (x * mask[:, None]).exp()
        return x


def test_values_of_the_batch_decide_as_in_a_real_step() -> None:
    model = ReadsAMask()
    peaks = []
    for padding in (0, 1):
        mask = torch.ones(ROWS, dtype=torch.bool)
        mask[:padding] = False
        prediction = stepscope.predict(
            model,
            adamw(model),
            {"x": torch.zeros(ROWS, WIDTH), "mask": mask},
            loss_fn=lambda model, batch: model(**batch).square().mean(),
        )
        assert prediction.assumed == ()
        peaks.append(prediction.phases[0].allocated)
    # One more activation is saved.
    assert peaks[1] - peaks[0] > 0.9 * ROWS * WIDTH * 4


def test_a_value_of_the_weights_is_taken_as_zero_and_reported() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        value = square(model, batch)
        assert not value.item()
        return value

    model = nn.Linear(WIDTH, WIDTH)
    prediction = stepscope.predict(model, adamw(model), torch.zeros(4, WIDTH), loss_fn=loss)
    (line,) = prediction.assumed
    assert line.startswith(f"{Path(__file__).name}:")
    assert line in str(prediction)


def test_sizes_that_depend_on_weights_are_refused() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        out = model(batch)
        return out[out > 0].sum()

    model = nn.Linear(WIDTH, WIDTH)
    with pytest.raises(UsageError, match=rf"{Path(__file__).name}:\d+"):
        stepscope.predict(model, adamw(model), torch.zeros(4, WIDTH), loss_fn=loss)


def test_a_model_that_cannot_be_copied_is_refused_with_the_reason() -> None:
    model = nn.Linear(WIDTH, WIDTH)
    model.lock = (x for x in ())  # type: ignore[assignment]
    with pytest.raises(UsageError, match="generator"):
        predicted(model)


MODULE = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(1000, 128)
        nn.init.trunc_normal_(self.embedding.weight)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(128, 4, 512, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(128, 1000)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

def build():
    def make_batch(size, device):
        return torch.randint(1000, (size, 64), device=device)

    def loss(outputs, batch):
        return nn.functional.cross_entropy(outputs.flatten(0, 1), batch.flatten())

    return Model().to(torch.float32), make_batch, loss
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "predicted_by_name.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("predicted_by_name", None)


Run = Callable[..., dict[str, Any]]


@pytest.fixture
def run(folder: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    del folder

    def call(*words: str) -> dict[str, Any]:
        from stepscope.cli.commands.predict import main

        assert main(["--model", "predicted_by_name:build", *words, "--json"]) == 0
        return json.loads(capsys.readouterr().out)["predictions"]

    return call


def test_the_command_predicts_a_model_by_name(run: Run) -> None:
    wide, narrow = run("--batch", "64", "--dtype", "float32", "bfloat16")
    assert narrow["peak_bytes"] < wide["peak_bytes"] <= wide["reserved_bytes"]
    assert [phase["phase"] for phase in wide["phases"]] == ["forward", "backward", "optimizer"]
    (again,) = run("--batch", "64", "--checkpoint", "blocks")
    assert again["peak_bytes"] < wide["peak_bytes"]


def test_a_budget_names_what_fits(run: Run) -> None:
    (whole,) = run("--batch", "64")
    budget = str(0.8 * whole["peak_bytes"] / 2**30)
    (answer,) = run("--batch", "64", "--budget", budget)
    assert answer["fitting"]
    for plan in answer["fitting"]:
        assert plan["peak_bytes"] <= 0.8 * whole["peak_bytes"]
        assert plan["batch"] < 64 or "recompute" in plan["blocks"]


def test_the_largest_batch_that_fits_is_named(run: Run) -> None:
    (small,) = run("--batch", "16", "--budget", "1 GiB")
    as_it_is, *with_plans = small["fitting"]
    batch = as_it_is["batch"]
    assert as_it_is["blocks"] == ""
    assert all(one["batch"] > batch for one in with_plans)
    fits, too_large = run("--batch", str(batch), str(batch + 1))
    assert fits["peak_bytes"] * MARGIN <= 1.002 * 2**30
    assert too_large["peak_bytes"] * MARGIN > 0.998 * 2**30


def test_compiled_steps_are_estimates(run: Run) -> None:
    eager, blocks, whole = run("--batch", "64", "--compile", "no", "block", "model")
    assert (eager["is_estimate"], blocks["is_estimate"], whole["is_estimate"]) == (
        False,
        True,
        True,
    )
    assert blocks["peak_bytes"] < eager["peak_bytes"]
    assert whole["peak_bytes"] < eager["peak_bytes"]


def test_the_largest_batch_of_an_accelerated_step(run: Run) -> None:
    budget = str(200 / 2**10)
    eager, accelerated = run("--dtype", "bf16", "--compile", "no", "accelerate", "--budget", budget)
    assert 0 < accelerated["graph_pool_bytes"] < accelerated["peak_bytes"]
    (largest,) = accelerated["fitting"]
    assert largest["batch"] > eager["fitting"][0]["batch"]
    assert largest["peak_bytes"] * MARGIN <= 200 * 2**20


class Experts(nn.Module):
    """A mixture of experts, whose groups are multiplied at once."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, WIDTH, 2 * WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        ends = torch.arange(1, 5, dtype=torch.int32) * (len(x) // 4)
        out: Tensor = torch._grouped_mm(x, self.weight, offs=ends)
        return out


def test_groups_of_experts_are_multiplied_in_any_dtype() -> None:
    found = predicted(Experts())
    size = 4 * WIDTH * 2 * WIDTH * 4
    assert found.kinds[PARAMETERS] == size
    assert found.phases[-1].lines[GRADIENTS] == size


class HuggingFaceConfig:
    __module__ = "transformers.configuration_utils"

    def __init__(self) -> None:
        self.use_cache = True


class Cached(nn.Module):
    """Adds its input to a cache, as layers of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, cache: list[Tensor] | None) -> Tensor:
        if cache is not None:
            cache.append(x)
            x = torch.cat(cache).sum(0, keepdim=True) + x
        out: Tensor = x + self.down(torch.tanh(self.up(x)))
        return out


class CachingModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = HuggingFaceConfig()
        self.layers = nn.ModuleList(Cached() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        cache: list[Tensor] | None = [] if self.config.use_cache else None
        for layer in self.layers:
            x = layer(x, cache)
        return x


def test_blocks_that_run_again_have_no_cache() -> None:
    model, batch = CachingModel(), torch.randn(4 * ROWS, WIDTH)
    found = stepscope.predict(
        model, adamw(model), batch, loss_fn=square, ranks=4, sharding="full", dtype=torch.bfloat16
    )
    assert found.peak.allocated > WORKSPACE
    as_it_is, *_ = plans_of_step(model, adamw(model), batch, loss_fn=square)
    fitted = stepscope.fit(model, adamw(model), batch, loss_fn=square, budget=as_it_is.peak)
    assert fitted.plan.again_s
    assert not model.config.use_cache
    square(model, batch).backward()
    fitted.undo()
    assert model.config.use_cache


def test_the_answer_is_in_words_too(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from stepscope.cli.commands.predict import main

    del folder
    assert main(["--model", "predicted_by_name:build", "--budget", "0.01"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "does not fit into" in said
    assert "parameters and optimizer state alone have" in said


@pytest.mark.parametrize(
    "words",
    [("--size", "xl"), ("--sharding", "optimizer"), ("--sharding", "full"),
     ("--optimizer", "stepscope"), ("--checkpoint", "4"), ("--dtype", "fp8")],
)  # fmt: skip
def test_flags_of_built_in_models_are_refused(folder: Path, words: tuple[str, ...]) -> None:
    from stepscope.cli.commands.predict import main

    del folder
    with pytest.raises(UsageError):
        main(["--model", "predicted_by_name:build", *words])


def test_plans_on_ranks_are_a_table_and_a_figure(
    run: Run, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from stepscope.cli.commands.predict import main

    words = ("--batch", "64", "--ranks", "8", "--sharding", "full", "--frontier", "plans.svg")
    (answer,) = run(*words)
    peaks = [plan["peak_bytes"] for plan in answer["plans"]]
    assert len(peaks) > 2
    assert peaks == sorted(peaks, reverse=True)
    assert "recompute" in answer["plans"][-1]["blocks"]
    figure = (folder / "plans.svg").read_text()
    assert figure.startswith("<svg")
    assert "predicted peak, GiB" in figure
    budget = str(1.1 * peaks[-1] / 2**30)
    assert main(["--model", "predicted_by_name:build", *words, "--budget", budget]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "on each of 8 ranks" in said
    assert "The fastest plan that fits into" in said


def test_plans_belong_to_a_model_of_your_own() -> None:
    from stepscope.cli.commands.predict import main

    with pytest.raises(UsageError, match="--frontier"):
        main(["--size", "small", "--frontier", "plans.svg"])


def test_gradients_are_a_kind_of_their_own() -> None:
    kinds = predicted(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))).phases[2].lines
    assert kinds[GRADIENTS] == pytest.approx(kinds[PARAMETERS], rel=0.01)
    assert SAVED_KIND not in kinds
