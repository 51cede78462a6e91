"""FP8 on a GPU that has it: the study with real kernels, steps in FP8, the ceiling, learning."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import pytest
import torch

from quiet_bench import QuietBench
from stepscope.analysis.predict.step import predict
from stepscope.kernels.fp8.recipe import unavailable
from stepscope.measure import ceilings
from stepscope.measure.device import CudaDevice, pick_device
from stepscope.studies.fp8.cases import Fp8Flags, LayerProbe
from stepscope.studies.registry import find_study
from stepscope.training.flags import WorkloadFlags
from stepscope.training.plans import plan_of
from stepscope.training.transformer import TransformerStep
from stepscope.training.workload import Workload, workloads

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or unavailable("cuda") is not None,
    reason="needs a CUDA device with FP8",
)

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import fp8_learning  # noqa: E402


def in_fp8(dtype: str = "fp8", **fields: object) -> Workload:
    flags = WorkloadFlags(
        # Layers that the rule runs in FP8.
        size=("xl",),
        context=(2048,),
        dtype=(dtype,),
        attention=("sdpa",),
        loss=("fused",),
        layers=2,
        fused=True,
        fused_projections=True,
        **fields,  # type: ignore[arg-type]
    )
    (only,) = workloads(flags, ("train-step",))
    return only


def test_kernels_lose_what_the_emulation_loses() -> None:
    study = find_study("fp8")
    flags = Fp8Flags(size=("tiny",), context=64, batch=4, part=("tensors",), steps=4, probes=2)
    (case,) = study.cases(flags)
    done = study.measure(case, QuietBench(pick_device("cuda")))
    probes: list[LayerProbe] = done.attachments["probes"]
    for probe in probes:
        for gemm in probe.gemms.values():
            assert gemm.kernel is not None
            assert gemm.kernel == pytest.approx(gemm.fp8["e4m3"]["tensorwise"], rel=0.1)


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_a_pair_with_kernels_trains_alike(scaling: str) -> None:
    study = find_study("fp8")
    flags = Fp8Flags(
        size=("tiny",),
        context=128,
        batch=8,
        part=("training",),
        steps=60,
        seeds=1,
        scaling=(scaling,),
    )
    (case,) = study.cases(flags)
    done = study.measure(case, QuietBench(pick_device("cuda")))
    assert done.notes["arithmetic"] == "kernels"
    bf16, fp8 = (series.values for series in done.series)
    assert sum(fp8[-10:]) == pytest.approx(sum(bf16[-10:]), rel=0.03)
    assert fp8[-1] < 0.8 * fp8[0]


@pytest.mark.parametrize("dtype", ["fp8", "fp8-stream", "fp8-pure"])
@pytest.mark.parametrize("graph", [False, True])
def test_a_step_in_fp8_learns_its_batch(dtype: str, graph: bool) -> None:
    work = in_fp8(dtype, optimizer=("stepscope-in-backward",), graph=graph)
    step = TransformerStep(work, pick_device("cuda"))
    losses = []
    for _ in range(6):
        step.run()
        assert step.loss is not None
        losses.append(float(step.loss.detach()))
    assert losses[-1] < losses[0]
    decisions = step.model.copies.fp8.decisions  # type: ignore[union-attr]
    assert None in decisions.values()


@pytest.mark.parametrize("policy", ["all", "gates"])
def test_the_memory_of_a_step_in_fp8_is_predicted(policy: str) -> None:
    device = pick_device("cuda")
    assert isinstance(device, CudaDevice)
    work = in_fp8(optimizer=("stepscope-fused",), activation_policy=policy)
    # Tests before this one in the process may have left tensors.
    gc.collect()
    before = torch.cuda.memory_allocated()
    step = TransformerStep(work, device)
    step.run()
    device.reset_peak()
    step.run()
    peak = device.peak_bytes()
    assert peak is not None
    assert predict(plan_of(work, "cuda")).peak.allocated == pytest.approx(peak - before, rel=0.03)


def test_the_ceiling_of_fp8_is_above_that_of_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "_MATRIX_SIZES", {"cuda": (4096,)})
    monkeypatch.setattr(ceilings, "_SECONDS_PER_SHAPE", {"cuda": 0.1})
    device = pick_device("cuda")
    bf16, fp8 = (ceilings._matmul_rate(device, name) for name in ("bfloat16", "fp8"))
    assert (fp8.name, fp8.unit) == ("matmul.fp8", "FLOP/s")
    assert fp8.value > bf16.value


def test_the_learning_benchmark_trains_and_resumes(tmp_path: Path) -> None:
    out = tmp_path / "learning.jsonl"
    words = ["--models", "tiny", "--seeds", "1", "--out", str(out)]
    assert fp8_learning.main([*words, "--time-limit", "0"]) == 3
    assert fp8_learning.main([*words, "--resume"]) == 0
    bf16, fp8 = fp8_learning.read(out)
    assert fp8["fp8_weights"] > 0
    assert fp8["losses"][-1] == pytest.approx(bf16["losses"][-1], rel=0.05)
