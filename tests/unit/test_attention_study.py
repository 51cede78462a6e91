"""The attention study: its cases, predicted memory and findings."""

from __future__ import annotations

import weakref

import msgspec
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from quiet_bench import QuietBench
from sample_records import value_of
from stepscope.analysis.scaling import fitted_exponent
from stepscope.errors import UsageError
from stepscope.measure.device import CpuDevice, pick_device
from stepscope.records.schema import Quantity, Record
from stepscope.report.blocks import Finding
from stepscope.studies.attention.view import peak_lines, predicted_peak_bytes
from stepscope.studies.attention.workload import AttentionStep, AttentionWorkload
from stepscope.studies.base import CaseSkipped
from stepscope.studies.registry import find_study
from study_records import attention_record
from view_blocks import coded, findings_of, rows_of, table_of


def workload(**changes: object) -> AttentionWorkload:
    fields: dict[str, object] = {
        "attention": "reference",
        "batch": 2,
        "heads": 3,
        "seq": 20,
        "head": 8,
        "dtype": "float32",
        "causal": False,
        "mode": "both",
    }
    return AttentionWorkload(**fields | changes)  # type: ignore[arg-type]


def findings(records: list[Record], code: str) -> list[Finding]:
    return findings_of(find_study("attention").view(records), code)


def finding(records: list[Record], code: str) -> Finding:
    return coded(find_study("attention").view(records), code)


def times_rows(records: list[Record]) -> list[dict[str, object]]:
    return rows_of(table_of(find_study("attention").view(records), "attention-times"))


def by_pass(records: list[Record], code: str) -> dict[object, object]:
    """Exponents by pass."""
    return {one.values["pass"]: one.values["exponent"] for one in findings(records, code)}


def test_kernel_flops_count_the_backward_as_two_and_a_half_forwards() -> None:
    forward = 4 * 2 * 3 * 20 * 20 * 8
    assert workload(mode="forward").flops() == forward
    assert workload(mode="backward").flops() == 2.5 * forward
    assert workload(mode="both", causal=True).flops() == 3.5 * forward / 2


@pytest.mark.parametrize("causal", [False, True])
def test_predicted_saved_bytes_match_autograd(causal: bool) -> None:
    work = workload(causal=causal, mode="forward")
    step = AttentionStep(work, pick_device("cpu"))
    inputs = {t.untyped_storage().data_ptr() for t in (step.q, step.k, step.v)}
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in inputs:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        step._forward()
    out = step._out
    assert out is not None
    assert sum(saved.values()) + out.nbytes == work.predicted_saved_bytes()


class LargestInUse(TorchDispatchMode):
    """Bytes of all live storages created by operators."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        given = {x.untyped_storage()._cdata for x in tree_leaves(args) if torch.is_tensor(x)}
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if torch.is_tensor(x) and x.untyped_storage()._cdata not in self._known | given:
                self._add(x.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        self._known.add(storage._cdata)
        self.now += storage.nbytes()
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._drop, storage._cdata, storage.nbytes())

    def _drop(self, storage: int, size: int) -> None:
        self._known.discard(storage)
        self.now -= size


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mode", ["forward", "backward"])
def test_the_predicted_peak_matches_live_storages(mode: str, causal: bool) -> None:
    work = workload(mode=mode, causal=causal, batch=1, heads=1, seq=96)
    step = AttentionStep(work, pick_device("cpu"))
    with LargestInUse() as largest:
        step._forward()
        if mode == "backward":
            largest.most = largest.now
            step._backward()
    lines = peak_lines(work)
    allocated_before = lines["q, k, v"] + lines["gradient of the output"]
    assert largest.most == predicted_peak_bytes(work) - allocated_before


def test_the_peak_is_reported_by_tensor_and_its_growth_fitted() -> None:
    records = [
        attention_record("backward", seq=seq, peak=1.02 * work_peak, step=1.0)
        for seq in (1024, 4096, 16384)
        if (
            work_peak := predicted_peak_bytes(
                workload(batch=8, heads=1, seq=seq, head=64, mode="backward"), on_cuda=True
            )
        )
    ]
    peak = finding(records, "attention.predicted-peak")
    assert (peak.values["exact"], peak.values["cases"]) == (0, 3)
    assert peak.values["case"] == "d 64, length 16384"
    largest = records[-1].quantity("peak_bytes") or 0.0
    assert peak.values["off_bytes"] == pytest.approx(largest - largest / 1.02)
    assert peak.records == tuple(record.id for record in records)
    growth = finding(records, "attention.memory-growth")
    assert (growth.values["quantity"], growth.values["by"]) == ("peak_bytes", "length")
    assert growth.values["exponent"] == pytest.approx(1.95, abs=0.05)
    table = table_of(find_study("attention").view(records), "attention-peak")
    sizes = {row[1]: row[2] for row in table.rows}
    assert sizes["their gradient"] == 8 * 16384**2 * 4
    parts = [size for name, size in sizes.items() if name != "measured peak"]
    assert sum(parts) == pytest.approx(sizes["measured peak"])


@pytest.mark.parametrize("mode", ["forward", "backward", "both"])
def test_each_mode_runs_its_passes(mode: str) -> None:
    step = AttentionStep(workload(mode=mode), pick_device("cpu"))
    assert [p.name for p in step.phases()] == {
        "forward": ["forward"],
        "backward": ["backward"],
        "both": ["forward", "backward"],
    }[mode]
    step.reset()
    # For a backward alone, reset runs the forward; the others start without an output.
    assert (step._out is not None) == (mode == "backward")
    for phase in step.phases():
        phase.run()
    if mode != "forward":
        truth = torch.nn.functional.scaled_dot_product_attention(step.q, step.k, step.v)
        for got, wanted in zip(
            step._gradients,
            torch.autograd.grad(truth, (step.q, step.k, step.v), step.grad),
            strict=True,
        ):
            torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("field", ["batch", "heads", "seq", "head"])
def test_an_empty_dimension_is_rejected(field: str) -> None:
    with pytest.raises(UsageError, match=f"{field} is 0"):
        workload(**{field: 0})


def test_a_dtype_that_is_not_a_tensor_dtype_is_rejected() -> None:
    with pytest.raises(UsageError, match=r"'tf32'.*float32, bfloat16, float16"):
        workload(dtype="tf32")


def test_predicted_saved_bytes_are_compared_with_measured() -> None:
    near = attention_record(seq=256)
    predicted = near.quantity("predicted_saved_bytes")
    assert predicted is not None
    records = [attention_record(seq=256, saved=predicted * 1.03), attention_record(seq=1024)]
    result = finding(records, "attention.predicted-saved")
    assert (result.values["exact"], result.values["cases"]) == (0, 1)
    assert result.values["off_bytes"] == pytest.approx(0.03 * predicted)
    assert result.records == (records[0].id,)
    exact = [attention_record(seq=256, saved=predicted)]
    assert finding(exact, "attention.predicted-saved").values["exact"] == 1


def test_the_first_length_that_does_not_fit_is_reported() -> None:
    records = [
        attention_record(seq=4096),
        attention_record(seq=16384, status="oom", reason="out"),
        attention_record(seq=8192, head=128, status="oom", reason="out"),
    ]
    result = finding(records, "attention.memory-limit")
    assert result.values["first"] == "reference float32, d 128, length 8192, forward"
    assert result.values["scores_bytes"] == 8 * 16384**2 * 4
    assert result.tone == "warn"
    assert result.records == (records[1].id, records[2].id)
    (row,) = times_rows(records[2:])
    assert (row["length"], row["forward mean"], row["forward std"]) == (8192, "OOM", None)


@pytest.mark.parametrize("library", [0, 64 << 20])
def test_the_peak_on_a_gpu_has_one_more_tensor_and_the_cublas_workspace(library: int) -> None:
    work = workload(batch=8, heads=1, seq=16384, head=64, mode="backward")
    tensors = predicted_peak_bytes(work, on_cuda=True)
    one_more = 8 * 16384**2 * 4
    assert tensors == predicted_peak_bytes(work) + one_more
    peak = attention_record("backward", seq=16384, peak=tensors + library, step=1.0)
    on_gpu = msgspec.structs.replace(
        peak,
        quantities=(
            *peak.quantities,
            Quantity(name="library_bytes", value=library, unit="B"),
        ),
        environment=msgspec.structs.replace(
            peak.environment, device_kind="cuda", device_memory_bytes=140 << 30
        ),
    )
    assert finding([on_gpu], "attention.predicted-peak").values["exact"] == 1
    fits = finding([on_gpu], "attention.memory-limit").values
    assert (fits["fits"], fits["beyond"]) == (32768, 65536)


def test_fitted_exponent_of_a_power_law_and_of_invalid_points() -> None:
    x = [1.0, 2.0, 4.0, 8.0]
    assert fitted_exponent(x, [3 * value**1.7 for value in x]) == pytest.approx(1.7)
    for bad in (([1.0], [1.0]), ([0.0, 1.0], [1.0, 1.0]), ([1.0, 2.0], [0.0, 1.0])):
        with pytest.raises(ValueError, match="exponent"):
            fitted_exponent(*bad)


def test_a_case_beyond_host_memory_is_skipped() -> None:
    class SmallHost(CpuDevice):
        @property
        def memory_bytes(self) -> int:
            return 1 << 20

    AttentionStep(workload(seq=64), SmallHost())
    with pytest.raises(CaseSkipped, match="needs at least"):
        AttentionStep(workload(seq=512), SmallHost())


SENTENCES = {
    "attention.memory-growth": (
        [attention_record(seq=seq, saved=40.0 * seq**2) for seq in (256, 1024, 4096)],
        "The memory saved for backward by the forward pass grows as length to the power 2.00 over"
        " 256 to 4096.",
    ),
    "attention.predicted-peak": (
        [attention_record("backward", peak=1e9)],
        "Peak memory of the backward pass, predicted as a sum of tensors: exact in 0 of 1 cases,"
        " off by 814 MiB at most (d 64, length 1024: 954 MiB).",
    ),
    "attention.predicted-saved": (
        [attention_record(seq=256, saved=2621440.0 * 1.03)],
        "Bytes saved for backward, predicted from the shapes: exact in 0 of 1 cases, off by 76.8"
        " KiB at most (reference float32, d 64, length 256, forward: 2.58 MiB).",
    ),
    "attention.memory-limit": (
        [attention_record(seq=16384, status="oom", reason="out")],
        "At length 16384 one tensor of scores takes 8.00 GiB (8 × 1 × 16384² × 4 B). The peak of"
        " the forward pass has two (scores, probabilities) such tensors, that of the backward pass"
        " four (probabilities, their gradient, gradient of the scores, temporary of the softmax's"
        " backward); the output at d 64 takes 32.0 MiB. The first case that does not fit into 139"
        " GiB is reference float32, d 64, length 16384, forward, whose tensors need 16.2 GiB at"
        " once; the rest is lost to fragmentation of the allocator.",
    ),
}


@pytest.mark.parametrize("code", SENTENCES)
def test_wording(code: str) -> None:
    records, sentence = SENTENCES[code]
    assert findings(records, code)[0].sentence == sentence


def test_cases_are_decoded_from_the_configs_of_records() -> None:
    study = find_study("attention")
    for case in study.cases(study.flags()):
        assert study.decode(case.config) == case
    first = study.cases(study.flags())[0]
    assert first.key == "reference_b8_h1_s256_d16_float32_full_forward"
    assert (first.needs, first.warmup, first.steps) == (("float32",), 5, 20)
    assert first.config == {
        "attention": "reference",
        "batch": 8,
        "heads": 1,
        "seq": 256,
        "head": 16,
        "dtype": "float32",
        "causal": False,
        "mode": "forward",
        "warmup": 5,
        "steps": 20,
    }


@pytest.mark.parametrize("mode", ["forward", "backward"])
def test_a_pass_is_measured(mode: str) -> None:
    study = find_study("attention")
    flags = study.flags(head_dim=(8,), context=(16,), batch=1, steps=2, warmup=1)
    (case,) = (case for case in study.cases(flags) if case.mode == mode)
    measured = study.measure(case, QuietBench())
    (step,) = (series for series in measured.series if series.name == "step")
    assert len(step.values) >= 2
    assert len(step.warmup) == 1
    assert value_of(measured.quantities, "flops") == case.flops()


GROWTH = ("attention.time-by-length", "attention.growth-unknown")


def growth(records: list[Record]) -> list[Finding]:
    return [one for code in GROWTH for one in findings(records, code)]


def lengths(*steps: float, **changes: object) -> list[Record]:
    return [
        attention_record("backward", seq=seq, step=step, **changes)  # type: ignore[arg-type]
        for seq, step in zip((256, 1024, 4096), steps, strict=True)
    ]
