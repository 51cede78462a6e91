"""The training step that studies share: its flags, its cases, its phases."""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import msgspec
import pytest
import torch

from sample_records import value_of
from stepscope.analysis.predict.plan import MODES, OPTIMIZERS, WITHIN_BACKWARD, Mode
from stepscope.errors import UsageError
from stepscope.kernels.fp8 import layers as fp8_layers
from stepscope.kernels.fp8 import recipe
from stepscope.measure.device import CpuDevice
from stepscope.model.config import PRECISIONS
from stepscope.studies.base import CaseSkipped, PlannedCase
from stepscope.training.flags import COMPILE, WorkloadFlags
from stepscope.training.transformer import TransformerStep
from stepscope.training.workload import Workload, workloads

SAFE = re.compile(r"[A-Za-z0-9._=+-]+")
WITHOUT_FP8 = tuple(name for name, policy in PRECISIONS.items() if not policy.fp8)
"""Dtypes that need no fused projections."""
EVERYTHING = WorkloadFlags(
    size=("small", "xl", "tiny"),
    context=(128, 512),
    batch=(1, 4),
    dtype=WITHOUT_FP8,
    attention=("reference", "sdpa"),
    compile=COMPILE,
    optimizer=OPTIMIZERS,
    checkpoint=("no", "1", "nested"),
)


SMALLEST: dict[str, Any] = {"vocab": 64, "d_model": 32, "d_ff": 64, "layers": 2, "heads": 2}
"""Sizes for kernels in Triton's interpreter."""


def workload(mode: Mode = "train-step", **fields: Any) -> Workload:
    flags = WorkloadFlags(size=("tiny",), context=(16,), batch=(2,), **fields)
    (only,) = workloads(flags, (mode,))
    return only


def test_keys_are_safe_and_distinct() -> None:
    keys = [each.key for each in workloads(EVERYTHING, ("train-step",))]
    assert len(keys) == len(set(keys)) == 3 * 2 * 2 * len(WITHOUT_FP8) * 2 * 3 * len(OPTIMIZERS) * 3
    assert all(SAFE.fullmatch(key) for key in keys)


def test_the_table_the_mode_and_each_changed_field_are_part_of_the_key() -> None:
    variants = [
        WorkloadFlags(),
        WorkloadFlags(table="2026"),
        WorkloadFlags(layers=4),
        WorkloadFlags(heads=4),
        WorkloadFlags(d_model=384),
        WorkloadFlags(d_ff=4),
        WorkloadFlags(vocab=4),
        WorkloadFlags(layers=4, heads=4),
    ]
    keys = [
        each.key for flags, mode in product(variants, MODES) for each in workloads(flags, (mode,))
    ]
    assert len(set(keys)) == len(variants) * len(MODES)
    assert all(SAFE.fullmatch(key) for key in keys)


def test_a_step_without_an_optimizer_has_one_case_for_all_optimizers() -> None:
    flags = WorkloadFlags(optimizer=OPTIMIZERS)
    assert len({each.key for each in workloads(flags, ("forward",))}) == 1
    assert len({each.key for each in workloads(flags, ("train-step",))}) == len(OPTIMIZERS)


def test_a_key_with_other_characters_is_refused() -> None:
    for key in ("", "a b", "a/b", "größe"):
        with pytest.raises(ValueError, match="case key"):
            PlannedCase(study="s", key=key, config={})


def test_overrides_are_recorded_and_applied() -> None:
    changed = workload(layers=3, heads=2, vocab=50)
    assert changed.overrides == {"n_layers": 3, "n_heads": 2, "vocab": 50}
    model = changed.model()
    assert (model.n_layers, model.n_heads, model.vocab, model.context) == (3, 2, 50, 16)
    assert model.d_model == workload().model().d_model
    assert workload().overrides == {}
    assert "n_heads=2" in changed.key


def test_a_workload_survives_serialization() -> None:
    sent = msgspec.json.decode(msgspec.json.encode(msgspec.to_builtins(workload(layers=1))))
    assert msgspec.convert(sent, Workload) == workload(layers=1)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"size": ("smal",)}, r"size 'smal' does not exist.*perhaps you meant small"),
        ({"size": ("10b",)}, r"size '10b' is not in the table of 2025"),
        ({"context": (0,)}, r"context is 0.*at least 1"),
        ({"batch": (0,)}, r"batch is 0.*at least 1"),
        ({"batch": (-1,)}, r"batch is -1"),
        ({"heads": 7}, r"n_heads 7 does not divide d_model 768"),
        ({"d_model": 100}, r"d_model 100"),
        ({"layers": 0}, r"n_layers is 0"),
        ({"dtype": ("bf17",)}, r"'bf17' does not exist.*one of"),
        ({"attention": ("flush",)}, r"attention 'flush' does not exist"),
        ({"compile": ("yes",)}, r"compile 'yes' does not exist.*no, block, model"),
        (
            {"checkpoint": ("half",)},
            r"checkpointing strategy 'half' does not exist.*a number of blocks",
        ),
        ({"checkpoint": ("1-4",)}, r"smaller than the one around it"),
        ({"optimizer": ("sgd",)}, r"optimizer 'sgd' does not exist"),
        ({"compile_mode": ("fast",)}, r"compile mode 'fast' does not exist.*reduce-overhead"),
        ({"loss": ("chunked",)}, r"loss 'chunked' does not exist.*plain, fused"),
    ],
)
def test_invalid_values_are_named_with_a_fix(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        list(workloads(WorkloadFlags(**fields), MODES))


def test_an_older_record_is_a_step_without_checkpointing() -> None:
    old = msgspec.to_builtins(workload())
    del old["checkpoint"]
    assert msgspec.convert(old, Workload) == workload()


def test_needs_follow_from_dtype_and_compilation() -> None:
    assert workload(dtype=("tf32",)).needs == ("tf32",)
    assert workload(dtype=("bfloat16-pure",)).needs == ("bfloat16",)
    assert workload(compile=("block",)).needs == ("float32", "compiler")
    assert workload(graph=True).needs == ("float32", "graph")
    in_fp8 = workload(dtype=("fp8",), fused=True, fused_projections=True)
    assert in_fp8.needs == ("bfloat16", "fp8")
    eager, own = (
        workload(compile=("block",), compile_mode=(m,)) for m in ("default", "reduce-overhead")
    )
    assert (eager.needs[-1], own.needs[-1]) == ("compiler", "graph")


def test_quantities_count_the_work_of_the_mode() -> None:
    forward, step = (workload(mode).quantities() for mode in ("forward", "train-step"))
    assert value_of(step, "flops") == 3 * value_of(forward, "flops")
    assert value_of(step, "tokens") == 32
    assert value_of(step, "parameters") == value_of(forward, "parameters")


@pytest.mark.parametrize(
    ("mode", "names"),
    [
        ("forward", ["forward"]),
        ("forward-backward", ["forward", "loss", "backward"]),
        ("train-step", ["forward", "loss", "backward", "optimizer"]),
    ],
)
def test_the_phases_of_a_mode_in_their_order(mode: Mode, names: list[str]) -> None:
    step = TransformerStep(workload(mode), CpuDevice())
    assert [phase.name for phase in step.phases()] == names


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize("dtype", [name for name in WITHOUT_FP8 if name != "tf32"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_train_step_changes_the_weights(dtype: str, optimizer: str) -> None:
    if optimizer in WITHIN_BACKWARD and dtype == "float16":
        with pytest.raises(CaseSkipped, match="gradients"):
            TransformerStep(workload(dtype=(dtype,), optimizer=(optimizer,)), CpuDevice())
        return
    step = TransformerStep(
        workload(dtype=(dtype,), optimizer=(optimizer,), **SMALLEST), CpuDevice()
    )
    before = [p.detach().clone() for p in step.model.parameters()]
    for _ in range(2):
        step.reset()
        step.run_phases()
    assert torch.isfinite(step.loss)  # type: ignore[arg-type]
    pairs = zip(before, step.model.parameters(), strict=True)
    # A gain of 1 in bfloat16 is too coarse for one step to move it.
    assert all(not torch.equal(old, new) for old, new in pairs if new.ndim > 1)
    assert step.gradients_missing() == 0


def test_a_step_in_fp8_is_skipped_without_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    in_fp8 = workload(dtype=("fp8",), fused=True, fused_projections=True)
    with pytest.raises(CaseSkipped, match="FP8 GEMMs need an NVIDIA GPU; the device is cpu"):
        TransformerStep(in_fp8, CpuDevice())
    for module in (recipe, fp8_layers):
        monkeypatch.setattr(module, "unavailable", lambda *_: None)
    # A small step would be one in bfloat16 under the name of FP8.
    with pytest.raises(CaseSkipped, match="no layer would run in FP8: the casts cost more than"):
        TransformerStep(in_fp8, CpuDevice())
    monkeypatch.setattr(fp8_layers.choice, "not_worth_it", lambda *_: None)
    step = TransformerStep(in_fp8, CpuDevice())
    assert step.model.copies.fp8 is not None  # type: ignore[union-attr]


def test_missing_gradients_are_counted() -> None:
    step = TransformerStep(workload(), CpuDevice())
    parameters = list(step.model.parameters())
    parameters[0].requires_grad_(False)
    assert step.gradients_missing() == 1


def test_forward_backward_starts_every_step_without_gradients() -> None:
    step = TransformerStep(workload("forward-backward"), CpuDevice())
    step.run_phases()
    step.reset()
    assert step.logits is None
    assert all(p.grad is None for p in step.model.parameters())


def test_a_host_refuses_what_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuDevice, "memory_bytes", 1 << 20)
    with pytest.raises(CaseSkipped, match=r"needs at least .* GiB, this machine has 0\.0"):
        TransformerStep(workload(), CpuDevice())


def test_default_values_are_not_in_the_key() -> None:
    """Records older than a field keep their key."""
    assert workload().key == "tiny_c16_b2_float32_reference_train-step"
    changed = workload(
        compile=("block",),
        compile_mode=("max-autotune",),
        optimizer=("stepscope-fused",),
        loss=("fused",),
        fused=True,
        graph=True,
    )
    assert changed.key == (
        "tiny_c16_b2_float32_reference_compile=block_mode=max-autotune_adamw=stepscope-fused"
        "_loss=fused_fused_graph_train-step"
    )
    assert workload("forward", loss=("fused",)).key == workload("forward").key
    old = msgspec.to_builtins(workload())
    for name in ("compile_mode", "loss", "fused", "graph"):
        del old[name]
    assert msgspec.convert(old, Workload) == workload()


def test_a_fused_loss_has_no_phase_and_learns_the_same() -> None:
    losses = []
    for loss, fused in (("plain", False), ("fused", True)):
        step = TransformerStep(workload(loss=(loss,), fused=fused, **SMALLEST), CpuDevice())
        for _ in range(3):
            step.reset()
            step.run_phases()
        assert step.gradients_missing() == 0
        step.reset()
        for phase in step.phases()[:-1]:
            phase.run()
        losses.append(step.loss.item())  # type: ignore[union-attr]
    assert [phase.name for phase in step.phases()] == ["forward", "backward", "optimizer"]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_graph_is_refused_where_it_is_not_supported() -> None:
    step = TransformerStep(workload(graph=True, optimizer=("stepscope-fused",)), CpuDevice())
    with pytest.raises(CaseSkipped, match="NVIDIA GPUs"):
        step.phases()
    with pytest.raises(CaseSkipped, match="reads its step count on the CPU"):
        TransformerStep(workload(graph=True, optimizer=("stepscope",)), CpuDevice())


def test_names_are_distinct() -> None:
    from stepscope.training.flags import WorkloadFlags
    from stepscope.training.workload import workloads

    flags = [
        WorkloadFlags(size=("xl",), attention=("reference", "sdpa"), compile=("no", "block")),
        WorkloadFlags(size=("xl",), table="2026"),
        WorkloadFlags(size=("xl",), batch=(2,)),
        WorkloadFlags(size=("xl",), layers=2),
        WorkloadFlags(size=("xl",), checkpoint=("4", "nested")),
    ]
    names = [work.name for each in flags for work in workloads(each, ("train-step",))]
    assert len(set(names)) == len(names) == 9
    assert names[0] == "xl at context 512 in float32"
    assert "2026 xl at context 512 in float32" in names


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize("policy", ["all", "inputs-1"])
@pytest.mark.parametrize("dtype", ["bfloat16", "bfloat16-pure"])
def test_fused_projections_give_the_loss_of_the_plain_step(dtype: str, policy: str) -> None:
    fused_projections = {
        "fused": True, "fused_projections": True, "activation_policy": policy, "loss": ("fused",),
    }  # fmt: skip
    losses = []
    for more in ({}, fused_projections):
        step = TransformerStep(workload(dtype=(dtype,), **SMALLEST, **more), CpuDevice())
        for _ in range(2):
            step.reset()
            step.run_phases()
        losses.append(step.loss.item())  # type: ignore[union-attr]
        assert step.gradients_missing() == 0
    assert losses[1] == pytest.approx(losses[0], rel=2e-2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"fused_projections": True}, "add --fused"),
        ({"fused": True, "activation_policy": "gates"}, "needs fused projections"),
        ({"fused": True, "autotune_gemms": True}, "autotuned GEMMs need fused projections"),
        ({"fused": True, "dtype": ("fp8",)}, "fp8 runs the fused projections in FP8"),
        (
            {"fused": True, "fused_projections": True, "compile": ("block",)},
            "a compiled model has no fused projections",
        ),
        (
            {"fused": True, "fused_projections": True, "activation_policy": "some"},
            "activation policy 'some' does not exist",
        ),
    ],
)
def test_fused_projections_need_fused_kernels(fields: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        workload(**fields)
