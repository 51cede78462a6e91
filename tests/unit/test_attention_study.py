"""The study of attention alone: its cases, its accounting, its findings."""

from __future__ import annotations

import weakref

import msgspec
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stepscope.analysis.scaling import fitted_exponent
from stepscope.errors import UsageError
from stepscope.measure.device import CpuDevice, pick_device
from stepscope.records.schema import Lint, Quantity, Record
from stepscope.report.blocks import Finding, Table
from stepscope.studies.attention_memory import peak_lines, predicted_peak_bytes
from stepscope.studies.attention_workload import AttentionStep, AttentionWorkload
from stepscope.studies.base import CaseSkipped
from stepscope.studies.registry import find_study
from study_records import attention_record


def workload(**changes: object) -> AttentionWorkload:
    fields: dict[str, object] = {
        "attention": "reference", "batch": 2, "heads": 3, "seq": 20, "head": 8,
        "dtype": "float32", "causal": False, "mode": "both",
    }  # fmt: skip
    return AttentionWorkload(**fields | changes)  # type: ignore[arg-type]


def sentences(records: list) -> list[str]:
    blocks = find_study("attention").view(records)
    return [block.text for block in blocks if isinstance(block, Finding)]


def test_kernel_flops_count_the_backward_two_and_a_half_times() -> None:
    forward = 4 * 2 * 3 * 20 * 20 * 8
    assert workload(mode="forward").flops() == forward
    assert workload(mode="backward").flops() == 2.5 * forward
    assert workload(mode="both", causal=True).flops() == 3.5 * forward / 2


@pytest.mark.parametrize("causal", [False, True])
def test_the_predicted_bytes_are_those_that_autograd_keeps(causal: bool) -> None:
    work = workload(causal=causal, mode="forward")
    step = AttentionStep(work, pick_device("cpu"))
    inputs = {t.untyped_storage().data_ptr() for t in (step.q, step.k, step.v)}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in inputs:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        step._forward()
    out = step._out
    assert out is not None
    assert sum(kept.values()) + out.nbytes == work.predicted_saved_bytes()


class LargestInUse(TorchDispatchMode):
    """Bytes of all storages that operators made and that are still there."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        given = {x.untyped_storage()._cdata for x in tree_leaves(args) if torch.is_tensor(x)}
        made = func(*args, **(kwargs or {}))
        for x in tree_leaves(made):
            if torch.is_tensor(x) and x.untyped_storage()._cdata not in self._known | given:
                self._add(x.untyped_storage())
        return made

    def _add(self, storage: torch.UntypedStorage) -> None:
        self._known.add(storage._cdata)
        self.now += storage.nbytes()
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._drop, storage._cdata, storage.nbytes())

    def _drop(self, place: int, size: int) -> None:
        self._known.discard(place)
        self.now -= size


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mode", ["forward", "backward"])
def test_the_predicted_peak_is_what_is_there_at_once(mode: str, causal: bool) -> None:
    work = workload(mode=mode, causal=causal, batch=1, heads=1, seq=96)
    step = AttentionStep(work, pick_device("cpu"))
    with LargestInUse() as largest:
        step._forward()
        if mode == "backward":
            largest.most = largest.now
            step._backward()
    lines = peak_lines(work)
    there_before = lines["q, k, v"] + lines["gradient of the output"]
    assert largest.most == predicted_peak_bytes(work) - there_before


def test_the_peak_is_told_tensor_by_tensor_and_its_growth_fitted() -> None:
    records = [
        attention_record("backward", seq=seq, peak=1.02 * work_peak, step=1.0)
        for seq in (1024, 4096, 16384)
        if (
            work_peak := predicted_peak_bytes(
                workload(batch=8, heads=1, seq=seq, head=64, mode="backward"), on_cuda=True
            )
        )
    ]
    told = sentences(records)
    (peak,) = [text for text in told if "peak of the backward is predicted" in text]
    assert "to the byte in 0 of 3 cases, off by 659 MiB at most (d 64, length 16384" in peak
    assert any("peaks at grows as length to the power 1.9" in text for text in told)
    (table,) = [
        block
        for block in find_study("attention").view(records)
        if isinstance(block, Table) and block.name == "attention-peak"
    ]
    sizes = {row[1]: row[2] for row in table.rows}
    assert sizes["their gradient"] == 8 * 16384**2 * 4
    parts = [size for name, size in sizes.items() if name != "measured peak"]
    assert sum(parts) == pytest.approx(sizes["measured peak"])


@pytest.mark.parametrize("mode", ["forward", "backward", "both"])
def test_each_mode_times_what_it_says(mode: str) -> None:
    step = AttentionStep(workload(mode=mode), pick_device("cpu"))
    assert [p.name for p in step.phases()] == {
        "forward": ["forward"], "backward": ["backward"], "both": ["forward", "backward"],
    }[mode]  # fmt: skip
    step.reset()
    # A lone backward finds its forward done; the others start from nothing.
    assert (step._out is not None) == (mode == "backward")
    for phase in step.phases():
        phase.run()
    if mode != "forward":
        truth = torch.nn.functional.scaled_dot_product_attention(step.q, step.k, step.v)
        for got, wanted in zip(
            step._gradients, torch.autograd.grad(truth, (step.q, step.k, step.v), step.grad),
            strict=True,
        ):  # fmt: skip
            torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("field", ["batch", "heads", "seq", "head"])
def test_an_empty_dimension_is_refused_by_name(field: str) -> None:
    with pytest.raises(UsageError, match=f"{field} is 0"):
        workload(**{field: 0})


def test_a_format_that_no_tensor_has_is_refused() -> None:
    with pytest.raises(UsageError, match=r"'tf32'.*float32, bfloat16, float16"):
        workload(dtype="tf32")


def test_exponents_are_those_of_the_times() -> None:
    records = [
        attention_record(mode, seq=seq, step=step)
        for mode, power in (("forward", 2.0), ("backward", 1.5))
        for seq, step in ((256, 1.0), (1024, 4.0**power), (4096, 16.0**power))
    ]
    told = sentences(records)
    assert any("forward grows as length to the power 2.00" in text for text in told)
    assert any("backward grows as length to the power 1.50" in text for text in told)


def test_the_prediction_is_held_against_what_was_measured() -> None:
    near = attention_record(seq=256)
    predicted = near.quantity("predicted_saved_bytes")
    assert predicted is not None
    records = [attention_record(seq=256, saved=predicted * 1.03), attention_record(seq=1024)]
    (told,) = [text for text in sentences(records) if "is predicted from the shapes" in text]
    assert "to the byte in 0 of 1 cases, off by 76.8 KiB at most" in told
    exact = [attention_record(seq=256, saved=predicted)]
    assert any("shapes: to the byte in 1 of 1 cases." in text for text in sentences(exact))


def test_the_first_length_that_does_not_fit_is_named_with_its_bytes() -> None:
    records = [
        attention_record(seq=4096),
        attention_record(seq=16384, status="oom", reason="out"),
        attention_record(seq=8192, head=128, status="oom", reason="out"),
    ]
    (told,) = [text for text in sentences(records) if "does not fit" in text]
    assert "d 128, length 8192, forward" in told
    # 8 × 1 × 16384² × 4 bytes
    assert "8.00 GiB" in told


@pytest.mark.parametrize("library", [0, 64 << 20])
def test_on_a_gpu_the_softmax_makes_one_more_and_the_library_takes_its_share(library: int) -> None:
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
    told = sentences([on_gpu])
    assert any("tensors one by one: to the byte in 1 of 1 cases." in text for text in told)
    (fits,) = [text for text in told if "one tensor of scores is 8.00 GiB" in text]
    assert "four (probabilities, their gradient, gradient of the scores, product within" in fits
    assert "so would 32768 (128 GiB), and the backward of 65536 would not: it needs 513" in fits


def test_what_grows_with_d_only_in_part_is_told_apart() -> None:
    records = [
        attention_record(seq=4096, head=head, step=10.0 + 0.1 * head) for head in (16, 32, 64)
    ]
    (told,) = [text for text in sentences(records) if "The forward grows as d" in text]
    assert "leaves 10.0 ms at d 0" in told


def test_a_power_law_is_found_and_nonsense_refused() -> None:
    x = [1.0, 2.0, 4.0, 8.0]
    assert fitted_exponent(x, [3 * value**1.7 for value in x]) == pytest.approx(1.7)
    for bad in (([1.0], [1.0]), ([0.0, 1.0], [1.0, 1.0]), ([1.0, 2.0], [0.0, 1.0])):
        with pytest.raises(ValueError, match="exponent"):
            fitted_exponent(*bad)


def test_what_a_host_cannot_hold_is_skipped_before_it_swaps() -> None:
    class SmallHost(CpuDevice):
        @property
        def memory_bytes(self) -> int:
            return 1 << 20

    AttentionStep(workload(seq=64), SmallHost())
    with pytest.raises(CaseSkipped, match="needs at least"):
        AttentionStep(workload(seq=512), SmallHost())


def test_formats_and_implementations_grow_apart() -> None:
    records = [
        attention_record(seq=seq, step=step, attention=attention)
        for attention, power in (("reference", 2.0), ("tiled", 1.0))
        for seq, step in ((256, 1.0), (1024, 4.0**power), (4096, 16.0**power))
    ]
    told = sentences(records)
    assert any("The forward grows as length to the power 2.00" in text for text in told)
    assert any("The forward (tiled) grows as length to the power 1.00" in text for text in told)


def growth(records: list[Record]) -> list[Finding]:
    blocks = find_study("attention").view(records)
    return [b for b in blocks if isinstance(b, Finding) and b.code.startswith("attention.growth")]


def lengths(*steps: float, **changes: object) -> list[Record]:
    return [
        attention_record("backward", seq=seq, step=step, **changes)  # type: ignore[arg-type]
        for seq, step in zip((256, 1024, 4096), steps, strict=True)
    ]


def test_a_growth_names_its_code_values_and_records() -> None:
    records = lengths(1.0, 16.0, 256.0)
    (found,) = growth(records)
    assert found.code == "attention.growth-with-length"
    assert found.values["exponent"] == pytest.approx(2.0)
    assert found.records == tuple(record.id for record in records)


def test_no_exponent_is_fitted_to_times_of_a_busy_machine() -> None:
    busy = (Lint(code="busy-machine", message="planted"),)
    (found,) = growth([*lengths(1.0, 16.0, 256.0)[:2], *lengths(1.0, 16.0, 256.0, lints=busy)[2:]])
    assert (found.code, found.tone) == ("attention.growth-unknown", "warn")
    assert "power" not in found.sentence
    assert "1.00 ms at 256, 16.0 ms at 1024, 256 ms at 4096" in found.sentence


def test_an_exponent_below_zero_is_not_a_growth() -> None:
    (found,) = growth(lengths(500.0, 30.0, 2.5))
    assert found.code == "attention.growth-unknown"
    assert found.values["exponent"] == pytest.approx(-1.9, abs=0.05)
    assert "power" not in found.sentence
