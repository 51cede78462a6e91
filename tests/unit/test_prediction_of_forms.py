"""Predicted memory of fused steps, compared with counts of every tensor and with races.

The kernels are launched but compute nothing: the memory of a step does not depend on its values,
so bfloat16, which Triton's interpreter gets wrong, is counted too.
"""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from step_race.races import RACES as ALL_RACES
from step_race.races import Heat, Racer
from test_prediction import counted_phases, plan, tiny
from triton.runtime.interpreter import InterpretedFunction

from fp8_on_cpu import pretend_fp8
from stepscope.analysis.predict import deferred_frees
from stepscope.analysis.predict.fit import MARGIN, changes_that_fit
from stepscope.analysis.predict.step import predict
from stepscope.attention.api import attention_with
from stepscope.errors import UsageError
from stepscope.kernels import launch as launching
from stepscope.kernels import norm
from stepscope.kernels.activation_policy import KEEPS
from stepscope.kernels.fp8 import choice, recipe
from stepscope.kernels.fp8.layers import Fp8Layers
from stepscope.model import ModelConfig, TransformerLM, cost
from stepscope.model.config import precision
from stepscope.optim import in_backward, launches
from stepscope.records.jsonl import read_records
from stepscope.records.memory import GRADIENTS, LIBRARIES, OPTIMIZER, PARAMETERS, WEIGHT_COPIES
from stepscope.torch_tools import side_stream
from stepscope.training.plans import plan_of, prediction_for
from stepscope.training.workload import Workload

RACES = Path(__file__).resolve().parents[2] / "results" / "step-race_h200.jsonl"
FUSED = {"fused": True}
JOINED = FUSED | {"fused_projections": True}
LESS = ("norms", "gates", "inputs", "inputs-2")
VARIANTS = (FUSED, JOINED, *(JOINED | {"activation_policy": keep} for keep in LESS))
VARIANT_NAMES = ("fused", "fused-projections", *LESS)
# One in which activations set the peak, and one in which the loss does.
WIDE = {"vocab": 16, "n_layers": 3, "d_model": 32, "d_ff": 128, "n_heads": 2}
LARGE_VOCAB = WIDE | {"vocab": 300, "d_ff": 48}


@pytest.fixture
def kernels_that_only_return(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        InterpretedFunction, "__getitem__", lambda *_: lambda *_, **__: None, raising=False
    )
    for module, name in ((launching, "supports_dtype"), (norm, "supports_dtype")):
        monkeypatch.setattr(module, name, lambda _: True)
    for optimizer in (launches, in_backward):
        monkeypatch.setattr(optimizer, "supports_dtype", lambda _: True)


def counted(work: Workload) -> dict[str, int]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return counted_phases(work)


def predicted(work: Workload) -> dict[str, int]:
    interpreted = plan_of(plain_variant(work), "cpu")
    variants = {
        name: getattr(work, name) for name in ("fused", "fused_projections", "activation_policy")
    }
    prediction = predict(msgspec.structs.replace(interpreted, interpreted=True, **variants))
    return {moment.phase: moment.allocated for moment in prediction.phases[1:]}


def plain_variant(work: Workload) -> Workload:
    return msgspec.structs.replace(
        work, fused=False, fused_projections=False, activation_policy="all"
    )


@pytest.mark.usefixtures("kernels_that_only_return")
@pytest.mark.parametrize("number", range(len(VARIANTS)), ids=VARIANT_NAMES)
def test_every_variant_is_predicted_to_the_byte(number: int) -> None:
    """With every dtype and every loss, each dtype with each loss in some variant."""
    losses = ((WIDE, "plain"), (LARGE_VOCAB, "plain"), (LARGE_VOCAB, "fused"))
    for offset, dtype in enumerate(("float32", "bfloat16", "bfloat16-pure")):
        shape, loss = losses[(number + offset) % 3]
        work = tiny(dtype, "sdpa", **shape)
        work = msgspec.structs.replace(work, loss=loss, **VARIANTS[number])
        assert predicted(work) == pytest.approx(counted(work), abs=8)


@pytest.mark.usefixtures("kernels_that_only_return")
@pytest.mark.parametrize("number", range(len(VARIANTS)), ids=VARIANT_NAMES)
def test_variants_in_checkpointed_segments_are_predicted_to_the_byte(number: int) -> None:
    for offset, dtype in enumerate(("float32", "bfloat16", "bfloat16-stream")):
        checkpoint = ("2", "nested")[(number + offset) % 2]
        work = tiny(dtype, "sdpa", checkpoint=checkpoint, **WIDE)
        work = msgspec.structs.replace(work, **VARIANTS[number])
        assert predicted(work) == pytest.approx(counted(work), abs=8)


@pytest.mark.usefixtures("kernels_that_only_return")
@pytest.mark.parametrize(
    ("optimizer", "first"),
    [
        ("stepscope-fused", 0), ("stepscope-fused", 1), ("stepscope-in-backward", 1),
        ("stepscope-in-backward", 2), ("stepscope-low-precision-grads", 2),
        ("stepscope-low-precision-grads", 0),
    ],
)  # fmt: skip
def test_gradients_live_until_their_update(optimizer: str, first: int) -> None:
    """Every dtype in two variants of three, and with each of them under some optimizer."""
    variants = ({}, FUSED, JOINED | {"activation_policy": "gates"})
    for number, dtype in enumerate(("float32", "bfloat16", "bfloat16-stream", "bfloat16-master")):
        variant = variants[(first + number) % 3]
        work = msgspec.structs.replace(
            tiny(dtype, "sdpa", mode="train-step", **WIDE), optimizer=optimizer, **variant
        )
        # The kernel's table of every tensor's address and settings has no line.
        tables = 200 * (9 * WIDE["n_layers"] + 3)
        assert predicted(work) == pytest.approx(counted(work), abs=tables)


@pytest.mark.usefixtures("kernels_that_only_return")
@pytest.mark.parametrize("number", range(6), ids=["all", *LESS, "gates-checkpointed"])
def test_steps_in_fp8_are_predicted_within_one_percent(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scales and partial maxima are left out."""
    policy = ("all", *LESS, "gates")[number]
    checkpoint = "2" if number == 5 else "no"
    pretend_fp8(monkeypatch)
    monkeypatch.setattr(torch, "_scaled_mm", result_of_scaled_mm)
    monkeypatch.setattr(recipe, "unavailable", lambda *_: None)
    monkeypatch.setattr(choice, "not_worth_it", lambda *_: None)
    shape = WIDE | {"d_model": 128, "d_ff": 256}
    variant = JOINED | {"activation_policy": policy}
    for offset, dtype in enumerate(("fp8", "fp8-stream", "fp8-pure")):
        optimizer = ("torch-fused", "stepscope-low-precision-grads")[(number + offset) % 2]
        work = tiny("bfloat16", "sdpa", mode="train-step", checkpoint=checkpoint, **shape)
        work = msgspec.structs.replace(work, optimizer=optimizer)
        plan = msgspec.structs.replace(
            plan_of(work, "cpu"), interpreted=True, dtype=dtype, **variant
        )
        peaks = {moment.phase: moment.allocated for moment in predict(plan).phases[1:]}
        in_fp8 = msgspec.structs.replace(work, dtype=dtype, **variant)
        assert peaks == pytest.approx(counted(in_fp8), rel=0.01)


@pytest.mark.usefixtures("kernels_that_only_return")
@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        # By dtype, in units of tokens times d_model: two inputs of norms, q, k and v, the output of
        # attention, gates of 8; in FP8 two outputs of norms and the input of the last layer of 4.
        ("all", {"float32": 2, "bfloat16": 3 + 1 + 8, "float8_e4m3fn": 2 + 4}),
        ("norms", {"bfloat16": 2 + 3 + 1 + 8, "float8_e4m3fn": 2}),
        ("gates", {"bfloat16": 2 + 3 + 1 + 8}),
        ("inputs", {"bfloat16": 2 + 3 + 1}),
    ],
)
def test_blocks_in_fp8_save_no_activation_twice(
    policy: str, expected: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_fp8(monkeypatch)
    monkeypatch.setattr(torch, "_scaled_mm", result_of_scaled_mm)
    config = ModelConfig(d_model=64, d_ff=256, n_layers=2, n_heads=2, vocab=16, context=40)
    model = TransformerLM(
        config, attention_with("sdpa"), fused=True, fused_projections=True,
        activation_policy=(policy,) * 2, fp8=Fp8Layers(always=True),
    )  # fmt: skip
    tokens = torch.zeros(2, 40, dtype=torch.long)
    storages: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel() % tokens.numel() == 0:
            storages.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    unit = tokens.numel() * config.d_model
    saved: dict[str, float] = {}
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with torch.autocast("cpu", torch.bfloat16), hooks:
        x = model.embedding(tokens)
        branch = None
        for block in model.blocks:
            x, branch = block.with_fused_projections(x, branch, model.copies, policy)
            if block is model.blocks[0]:
                # The second block: its input is the output of a block.
                storages.clear()
    for tensor in storages.values():
        units = tensor.untyped_storage().nbytes() / tensor.element_size() / unit
        name = str(tensor.dtype).removeprefix("torch.")
        saved[name] = saved.get(name, 0) + (units if units >= 1 else 0)
    assert {name: units for name, units in saved.items() if units} == expected


def result_of_scaled_mm(
    a: torch.Tensor, b: torch.Tensor, *, out_dtype: torch.dtype, **_: object
) -> torch.Tensor:
    """Allocate what the GEMM does."""
    return torch.zeros(a.shape[0], b.shape[1], dtype=out_dtype)


def test_without_kernels_the_eager_update_runs_in_the_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    variants = itertools.product(
        ("stepscope-fused", "stepscope-in-backward"), ("float32", "bfloat16-master")
    )
    for optimizer, dtype in variants:
        work = msgspec.structs.replace(
            tiny(dtype, "sdpa", mode="train-step", **WIDE), optimizer=optimizer
        )
        prediction = prediction_for(work, "cpu")
        assert prediction is not None
        peaks = {moment.phase: moment.allocated for moment in prediction.phases[1:]}
        # The step count of each parameter lives on the host, which is the device here.
        assert peaks == pytest.approx(counted(work), abs=200)


def races() -> list[tuple[str, Workload, float]]:
    """Eager steps of the races on an H200: name, step, peak. Without the autotuned GEMMs of xl at
    2048, which had a second output buffer there for each result that PyTorch allocates."""
    eager = []
    for record in read_records(RACES):
        race = record.config.get("race")
        heats = record.attachment("heats", dict[str, Heat]) or {}
        for racer in msgspec.convert(record.config.get("racers", []), list[Racer]):
            work = racer.workload
            if (
                racer.name in heats
                and work.compile == "no"
                and not (work.autotune_gemms and race == "xl-2048")
            ):
                peak = heats[racer.name].peak_bytes
                assert peak is not None
                eager.append((f"{race} {racer.name}", work, peak))
    return eager


def test_predictions_match_the_h200_races() -> None:
    """Within 0.1 %. A race counts requested bytes of weights and moments, and excludes what was
    allocated before: cuBLAS's workspace of the default stream."""
    eager = races()
    assert {name.split()[0] for name, *_ in eager} == {
        name for name, spec in ALL_RACES.items() if name != "tiny-64" and not spec.fp8
    }
    assert len(eager) == 28
    for name, work, peak in eager:
        prediction = predict(plan_of(work, "cuda"))
        lines = prediction.peak.lines
        rounded = lines[PARAMETERS] + lines[OPTIMIZER]
        requested = 3 * cost.weight_bytes(work.model(), precision(work.dtype))
        before = 2 * prediction.plan.workspace
        assert lines[LIBRARIES] >= before
        peak_by_race = prediction.peak.allocated - rounded + requested - before
        assert peak_by_race == pytest.approx(peak, rel=0.001), name


def test_constants_without_torch_match_the_kernels() -> None:
    assert deferred_frees.MAX_PENDING_BYTES == side_stream.MAX_PENDING_BYTES


def test_a_graph_replay_has_no_prediction() -> None:
    for name, work, _ in races():
        prediction = prediction_for(work, "cuda")
        assert (prediction is None) == work.graph, name
        assert work.graph == name.endswith("graph")


def test_saving_less_needs_less_memory() -> None:
    fields: dict[str, Any] = {
        "dtype": "bfloat16",
        "attention": "sdpa",
        "loss": "fused",
        "optimizer": "stepscope-in-backward",
        **JOINED,
    }
    plans = [plan("small", 1024, activation_policy=keep, **fields) for keep in KEEPS]
    peaks = [predict(each).peak.allocated for each in plans]
    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks)) == len(peaks)
    exact = predict(msgspec.structs.replace(plans[0], device="cpu", interpreted=True))
    model = exact.plan.model
    block = 4 * model.d_model**2 + 3 * model.d_model * model.d_ff
    multiplied = model.n_layers * block + model.vocab * model.d_model
    assert exact.peak.lines[WEIGHT_COPIES] == 2 * multiplied


def test_the_bytes_of_waiting_gradients_are_bounded() -> None:
    fields: dict[str, Any] = {"dtype": "bfloat16", "attention": "sdpa", "loss": "fused", **JOINED}
    after = predict(plan("large", 512, optimizer="stepscope-fused", **fields))
    within = predict(plan("large", 512, optimizer="stepscope-in-backward", **fields))
    weights = cost.weight_bytes(after.plan.model, precision("bfloat16"))
    gradients = [
        max(moment.lines.get(GRADIENTS, 0) for moment in prediction.phases)
        for prediction in (after, within)
    ]
    assert gradients[0] == pytest.approx(weights, rel=0.02)
    assert gradients[1] < 1.3 * side_stream.MAX_PENDING_BYTES < weights


def test_a_fused_projection_step_that_does_not_fit_gets_another_activation_policy() -> None:
    wanted = plan(
        "small",
        1024,
        dtype="bfloat16",
        attention="sdpa",
        loss="fused",
        optimizer="stepscope-in-backward",
        **JOINED,
    )
    peak = predict(wanted).peak.allocated
    for share, keep in ((0.94, "norms"), (0.9, "gates")):
        changes = changes_that_fit(wanted, int(share * peak))
        assert changes[0].words == f"activation policy {keep}"
        assert all(change.peak * MARGIN <= share * peak for change in changes)


@pytest.mark.parametrize(
    "fields",
    [
        {"fused_projections": True},
        {"activation_policy": "gates"},
        {"fused": True, "activation_policy": "gates"},
        JOINED | {"activation_policy": "everything"},
        JOINED | {"activation_policy": "inputs-99"},
        {"fused": True, "device": "cpu"},
        {"fused": True, "attention": "reference"},
        {"fused": True, "written_out": True},
        {"fused": True, "ranks": 2, "sharding": "full"},
        {"optimizer": "stepscope-in-backward", "ranks": 2},
        {"optimizer": "stepscope-in-backward", "dtype": "float16"},
        {"graph": True},
        {"graph": True, "optimizer": "stepscope-fused", "device": "cpu"},
    ],
)
def test_unsupported_plans_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        plan("small", **({"attention": "sdpa"} | fields))
