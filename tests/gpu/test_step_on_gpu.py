"""The fastest training step on a GPU: CUDA graphs with our kernels, autotuned GEMMs."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest
import torch
from step_loss import STUDY as STEP_LOSS
from step_loss.cases import LossFlags
from step_loss.measure import measure as measure_loss
from step_race.measure import Field
from step_race.races import racers

from quiet_bench import QuietBench
from step_records import tiny_race_case
from stepscope.kernels import autotune
from stepscope.kernels.autotune import autotuned_matmul_into, autotuned_matmuls
from stepscope.measure.device import CudaDevice
from stepscope.optim import FusedAdamW, InBackwardAdamW
from stepscope.studies.base import CaseSkipped
from stepscope.training.flags import WorkloadFlags
from stepscope.training.transformer import TransformerStep
from stepscope.training.workload import Workload, workloads

STEPS = 6


def workload(**fields: Any) -> Workload:
    flags = WorkloadFlags(
        **{"size": ("tiny",), "context": (128,), "batch": (2,), "dtype": ("bfloat16",)} | fields
    )
    (only,) = workloads(flags, ("train-step",))
    return only


def trained(work: Workload, device: CudaDevice) -> tuple[list[float], list[torch.Tensor]]:
    """Return losses and weights after a few steps on different batches."""
    step = TransformerStep(work, device)
    if work.graph:
        before = [p.detach().clone() for p in step.model.parameters()]
        phases = step.phases()
        with torch.no_grad():
            for parameter, initial in zip(step.model.parameters(), before, strict=True):
                parameter.copy_(initial)
            for state in step.optimizer.state.values():
                for tensor in state.values():
                    tensor.zero_()
        step.follow_weights()
    else:
        phases = step.phases()
    losses = []
    vocab = work.model().vocab
    for number in range(STEPS):
        generator = torch.Generator("cuda").manual_seed(number)
        for buffer in (step.tokens, step.targets):
            buffer.copy_(torch.randint(vocab, buffer.shape, device="cuda", generator=generator))
        step.reset()
        for phase in phases:
            phase.run()
        assert step.loss is not None
        losses.append(step.loss.item())
    return losses, [p.detach().clone() for p in step.model.parameters()]


@pytest.mark.parametrize("attention", ["sdpa_math", "auto"])
@pytest.mark.parametrize(
    "more",
    [
        {"optimizer": ("torch-fused",)},
        {"optimizer": ("stepscope-fused",)},
        {"optimizer": ("stepscope-fused",), "loss": ("fused",), "fused": True},
        {"optimizer": ("stepscope-fused",), "loss": ("fused",), "checkpoint": ("1",)},
        {
            "optimizer": ("stepscope-fused",),
            "loss": ("fused",),
            "fused": True,
            "fused_projections": True,
        },
        {
            "optimizer": ("stepscope-in-backward",),
            "loss": ("fused",),
            "fused": True,
            "fused_projections": True,
            "activation_policy": "gates",
        },
    ],
    ids=["torch", "stepscope", "our kernels", "checkpointed", "fused projections", "in backward"],
)
def test_a_replayed_step_trains_like_the_eager_step(
    device: CudaDevice, attention: str, more: dict[str, Any]
) -> None:
    fields = {"attention": (attention,), "size": ("mini",)} | more
    eager = trained(workload(**fields), device)
    replayed = trained(workload(**fields, graph=True), device)
    # The same kernels on the same numbers, except that the step count is on the device.
    assert replayed[0] == pytest.approx(eager[0], rel=2e-3)
    for one, other in zip(eager[1], replayed[1], strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=2e-3)


def test_a_compiled_step_is_replayed(device: CudaDevice) -> None:
    fields = {
        "attention": ("auto",), "compile": ("block",), "loss": ("fused",),
        "optimizer": ("stepscope-fused",),
    }  # fmt: skip
    eager, replayed = (
        trained(workload(**fields, **more), device)[0] for more in ({}, {"graph": True})
    )
    assert replayed == pytest.approx(eager, rel=2e-3)


def test_what_cannot_be_captured_is_skipped_and_leaves_the_device_usable(
    device: CudaDevice,
) -> None:
    for fields, reason in (
        ({"dtype": ("float16",)}, "overflowed"),
        ({"compile": ("block",), "compile_mode": ("reduce-overhead",)}, "creates CUDA graphs"),
    ):
        step = TransformerStep(workload(**fields, graph=True), device)
        with pytest.raises(CaseSkipped, match=reason):
            step.phases()
    torch.randn(4, device="cuda")


def test_gradients_are_counted_before_a_graph_frees_them(device: CudaDevice) -> None:
    step = TransformerStep(workload(graph=True, optimizer=("stepscope-fused",)), device)
    step.phases()
    assert step.gradients_missing() == 0
    assert all(p.grad is None for p in step.model.parameters())


def test_fused_adamw_in_a_graph_counts_steps_and_uses_the_learning_rate() -> None:
    def parameters() -> list[torch.nn.Parameter]:
        generator = torch.Generator().manual_seed(0)
        return [
            torch.nn.Parameter(torch.randn(size, generator=generator).cuda())
            for size in ((300, 70), (5000,), (7,))
        ]

    ours, plain = parameters(), parameters()
    grads = [torch.randn_like(p) for p in ours]
    for params in (ours, plain):
        for parameter, grad in zip(params, grads, strict=True):
            parameter.grad = grad.clone()
    optimizer = FusedAdamW(ours, lr=1e-2, capturable=True)
    reference = torch.optim.AdamW(plain, lr=1e-2)
    optimizer.step()
    reference.step()
    optimizer.prepare()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    for rate in (1e-2, 1e-2, 3e-3):
        optimizer.param_groups[0]["lr"] = reference.param_groups[0]["lr"] = rate
        optimizer.refresh()
        graph.replay()
        reference.step()
    assert {state["step"].item() for state in optimizer.state.values()} == {4.0}
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-6)


def test_matmuls_write_gradients_in_the_dtype_of_the_weights() -> None:
    from stepscope.kernels.matmul import _has_out_dtype, add_matmul, matmul_to_dtype

    assert _has_out_dtype(), "torch >= 2.8 has out_dtype"
    a = torch.randn(300, 2048, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(2048, 200, device="cuda", dtype=torch.bfloat16)
    exact = a.double() @ b.double()
    product = matmul_to_dtype(a, b, torch.float32)
    total = torch.ones_like(product)
    add_matmul(total, a, b)
    for actual, expected in ((product, exact), (total, exact + 1)):
        # In bfloat16 the error would be up to 0.5.
        torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=5e-3)


def test_optimizer_in_backward_keeps_few_gradients(
    device: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients of at most two layers of sixteen are in memory at once."""
    import stepscope.torch_tools.side_stream

    monkeypatch.setattr(stepscope.torch_tools.side_stream, "MAX_PENDING_BYTES", 1 << 22)
    layers = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024, bias=False) for _ in range(16)])
    layers.to("cuda")
    optimizer = InBackwardAdamW(layers.parameters())
    x = torch.randn(64, 1024, device="cuda")
    for _ in range(2):
        layers(x).square().mean().backward()
        optimizer.step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    device.reset_peak()
    layers(x).square().mean().backward()
    optimizer.step()
    torch.cuda.synchronize()
    # Each gradient is 4 MiB; activations are a quarter of one.
    assert (device.peak_bytes() or 0) - before < 8 * 4 * 2**20


@pytest.mark.parametrize("transposed", list(itertools.product((False, True), repeat=2)))
@pytest.mark.parametrize("wide", [False, True], ids=["same dtype", "float32"])
def test_an_autotuned_matmul_matches_torch(
    transposed: tuple[bool, bool], wide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The fastest kernel always replaces torch's choice.
    monkeypatch.setattr(autotune, "MAX_TIME_RATIO", 2.0)

    def random_matrix(rows: int, columns: int, transpose: bool) -> torch.Tensor:
        shape = (columns, rows) if transpose else (rows, columns)
        values = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        return values.T if transpose else values

    a, b = random_matrix(384, 640, transposed[0]), random_matrix(640, 256, transposed[1])
    exact = a.double() @ b.double()
    dtype = torch.float32 if wide else torch.bfloat16
    # Part of a wider matrix, as in a fused projection.
    buffer = torch.ones(384, 512, device="cuda", dtype=dtype)
    out = buffer[:, 256:]
    assert not autotuned_matmul_into(out, a, b)
    with autotuned_matmuls():
        assert autotuned_matmul_into(out, a, b)
        error = (out.double() - exact).norm() / exact.norm()
        assert error < (1e-5 if wide else 3e-3)
        assert buffer[:, :256].eq(1).all()
        assert autotuned_matmul_into(out, a, b, accumulate=True)
        assert ((out.double() - 2 * exact).norm() / exact.norm()) < (3e-5 if wide else 8e-3)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            assert autotuned_matmul_into(out, a, b)
            # A new shape: nothing is timed during a capture.
            assert not autotuned_matmul_into(buffer[:64, 256:], a[:64], b)
        out.zero_()
        graph.replay()
        assert ((out.double() - exact).norm() / exact.norm()) == error
        assert not autotuned_matmul_into(buffer[:, 250:506], a, b), "the address is not aligned"
        assert not autotuned_matmul_into(buffer[:192, 256:], a[::2, ::2], b[::2])


def test_a_capture_with_unprepared_gradients_raises() -> None:
    parameter = torch.nn.Parameter(torch.randn(64, device="cuda"))
    optimizer = FusedAdamW([parameter], capturable=True)
    parameter.grad = torch.randn_like(parameter)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="prepare"), torch.cuda.graph(graph):
        optimizer.step()
    torch.cuda.synchronize()


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"fused_projections": True},
        {"fused_projections": True, "activation_policy": "inputs"},
        {
            "fused_projections": True,
            "activation_policy": "gates",
            "optimizer": ("stepscope-in-backward",),
        },
        {"fused_projections": True, "optimizer": ("stepscope-in-backward",), "graph": True},
        {
            "fused_projections": True,
            "optimizer": ("stepscope-in-backward",),
            "autotune_gemms": True,
            "graph": True,
        },
        {
            "fused_projections": True,
            "optimizer": ("stepscope-low-precision-grads",),
            "autotune_gemms": True,
            "graph": True,
        },
    ],
    ids=[
        "fused",
        "fused projections",
        "inputs",
        "in backward",
        "graph",
        "autotuned",
        "low-precision gradients",
    ],
)
@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "bfloat16-stream", "bfloat16-pure", "bfloat16-master"]
)
def test_fused_variants_train_like_the_naive_model(
    device: CudaDevice, dtype: str, more: dict[str, Any]
) -> None:
    plain = trained(workload(dtype=(dtype,), attention=("sdpa",)), device)[0]
    options = {"fused": True, "loss": ("fused",), "optimizer": ("stepscope-fused",)} | more
    fused = trained(workload(dtype=(dtype,), attention=("sdpa",), **options), device)[0]
    assert fused == pytest.approx(plain, rel=1e-4 if dtype == "float32" else 1e-2)


def test_a_comparison_shares_weights_and_keeps_the_fastest_of_each_side(device: CudaDevice) -> None:
    variants = [
        racer._replace(
            workload=msgspec.structs.replace(
                racer.workload, size="mini", context=128, batch=2, compile="no",
                compile_mode="default",
            )
        )
        for racer in racers("small-512")
        if racer.workload.compile_mode == "default"
    ]  # fmt: skip
    alone = list({racer.name: racer for racer in variants}.values())
    field = Field(alone[0], QuietBench(device))
    case = tiny_race_case(form_seconds=60.0)
    for racer in alone:
        field.heat(racer, case)
    assert set(field.heats) == {"baseline", "stepscope", "low-precision"}, field.excluded
    assert not field.excluded
    entries = [field.entry(field.run_off(side)) for side in field.heats]
    baseline, *others = (entry.step.model for entry in entries)
    for other in others:
        pairs = zip(baseline.parameters(), other.parameters(), strict=True)
        assert all(one is same for one, same in pairs)
    heats = [heat for of_side in field.heats.values() for heat in of_side.values()]
    state = 12 * sum(p.numel() for p in baseline.parameters())
    # Weights and moments in float32 are a lower bound for every variant.
    assert all(heat.peak_bytes is not None and heat.peak_bytes >= 0.95 * state for heat in heats)


def test_a_mark_is_reached_when_all_earlier_work_is_done(device: CudaDevice) -> None:
    device.occupy(200.0)
    mark = device.mark()
    assert not device.reached(mark)
    device.synchronize()
    assert device.reached(mark)


def test_a_comparison_measures_the_energy_of_each_side(device: CudaDevice) -> None:
    from step_race.measure import measure

    measurement = measure(tiny_race_case(), QuietBench(device))
    limit = device.telemetry.power_limit_w()
    assert limit is not None
    assert "no_energy" not in measurement.notes, measurement.notes["no_energy"]
    for side in ("baseline", "stepscope"):
        values = {one.name: one.value for one in measurement.quantities if one.variant == side}
        assert 0 < values["power_w"] < 1.1 * limit
        expected = values["power_w"] * values["unbroken_step_ms"] * 1e-3
        assert values["joules"] == pytest.approx(expected)
        assert values["sm_clock_mhz"] > 0


def test_the_text_is_learned_in_every_precision(device: CudaDevice) -> None:
    flags = LossFlags(
        size=("tiny",), context=128, steps=60, seeds=(0,), words=32,
        rungs=(
            "bf16", "flash", "fused-loss", "fused-pieces", "fused-projections", "fused-optimizer",
            "in-backward", "graph", "autotune-gemms", "master",
        ),
    )  # fmt: skip
    ends = {}
    for case in STEP_LOSS.cases(flags):
        values = measure_loss(case, QuietBench(device)).series[0].values
        ends[case.rung] = sum(values[-6:]) / 6
        assert ends[case.rung] < 0.8 * values[0]
    for rung, end in ends.items():
        assert end == pytest.approx(ends["start"], rel=0.01), rung
