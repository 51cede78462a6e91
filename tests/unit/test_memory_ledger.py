"""The memory ledger of a running step: every storage is on one line, by what keeps it alive."""

from __future__ import annotations

import _thread
import gc
from functools import partial
from typing import Any

import pytest
import torch

from stepscope.measure.device import pick_device
from stepscope.measure.ledger import StorageLedger
from stepscope.measure.tensors import TensorBytes
from stepscope.model import cost
from stepscope.model.config import precision
from stepscope.records.memory import (
    GRADIENTS,
    INPUTS,
    LIBRARIES,
    OPTIMIZER,
    PARAMETERS,
    SAVED,
    WEIGHT_COPIES,
    WITHIN_OPERATORS,
    saved_bytes,
)
from stepscope.training.transformer import TransformerStep
from stepscope.training.workload import Workload

CPU = torch.device("cpu")


def recorded_step(
    dtype: str = "float32", attention: str = "reference"
) -> tuple[Workload, StorageLedger]:
    work = Workload(
        size="tiny",
        context=24,
        batch=2,
        dtype=dtype,
        attention=attention,
        mode="train-step",
        overrides={"vocab": 77},
    )
    step = TransformerStep(work, pick_device("cpu"))
    step.run_phases()
    step.reset()
    ledger = StorageLedger(CPU, None)
    with ledger.watching(step.model, step.optimizer):
        ledger.count((step.tokens, step.targets), INPUTS)
        for phase in step.phases():
            ledger.phase(phase.name, phase.run)
    return work, ledger


@pytest.fixture(scope="module")
def of_float32() -> tuple[Workload, StorageLedger]:
    return recorded_step()


def test_every_phase_adds_up(of_float32: tuple[Workload, StorageLedger]) -> None:
    _, ledger = of_float32
    assert [peak.phase for peak in ledger.peaks] == ["forward", "loss", "backward", "optimizer"]
    for peak in ledger.peaks:
        assert peak.unattributed == 0
        assert min(peak.lines.values()) > 0


def test_the_ends_of_phases_add_up_and_free_memory(
    of_float32: tuple[Workload, StorageLedger],
) -> None:
    work, ledger = of_float32
    ends = {end.phase: end for end in ledger.ends}
    assert list(ends) == [peak.phase for peak in ledger.peaks]
    assert all(end.unattributed == 0 for end in ends.values())
    weights = cost.weight_bytes(work.model(), precision("float32"))
    assert ends["backward"].lines[GRADIENTS] == weights
    assert not saved_bytes(ends["backward"].lines)
    assert GRADIENTS not in ends["optimizer"].lines
    for peak in ledger.peaks:
        assert ends[peak.phase].allocated <= peak.allocated


def test_parameters_gradients_and_optimizer_state_are_on_their_lines(
    of_float32: tuple[Workload, StorageLedger],
) -> None:
    work, ledger = of_float32
    weights = cost.weight_bytes(work.model(), precision("float32"))
    last = ledger.peaks[-1].lines
    assert last[PARAMETERS] == weights
    assert last[GRADIENTS] == weights
    # The two moments, and a count of steps for each parameter.
    assert 0 < last[OPTIMIZER] - 2 * weights < 4 * 100
    assert WEIGHT_COPIES not in last


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_saved_bytes_match_the_formula(dtype: str) -> None:
    work, ledger = recorded_step(dtype)
    dtypes = precision(dtype)
    saved = cost.activation_bytes(work.model(), 2, 24, dtypes, "reference", "cpu")
    loss = ledger.peaks[1].lines
    assert loss.get(WEIGHT_COPIES, 0) == saved.weight_copies
    indices = 2 * 2 * 24 * 8
    assert saved_bytes(loss) == saved.total - saved.weight_copies - indices
    block = [t for t in ledger.saved if t.module.startswith("blocks.1.")]
    per_block = cost.activation_bytes(work.model(), 2, 24, dtypes, "reference", "cpu").per_block
    assert sum(tensor.bytes for tensor in block) == per_block


def test_saved_tensors_name_operator_shape_and_line_of_code() -> None:
    _, ledger = recorded_step("bfloat16")
    softmax = [t for t in ledger.saved if t.operator == "softmax"]
    assert [t.module for t in softmax] == ["blocks.0.attention", "blocks.1.attention"]
    assert softmax[0].shape == (2, 4, 24, 24)
    assert softmax[0].dtype == "bfloat16"
    assert softmax[0].code.startswith("reference.py:")
    norms = [t for t in ledger.saved if t.module == "blocks.0.attention_norm"]
    assert {t.dtype for t in norms} == {"float32"}


def test_flash_attention_saves_no_scores() -> None:
    _, ledger = recorded_step(attention="sdpa")
    assert not [t for t in ledger.saved if t.operator == "softmax"]
    assert f"{SAVED}attention, softmax" not in ledger.peaks[1].lines


def test_the_largest_tensor_is_named_with_its_line(
    of_float32: tuple[Workload, StorageLedger],
) -> None:
    work, ledger = of_float32
    size, operator, code = ledger.largest
    # A gradient of a feed-forward matrix.
    assert size == work.model().d_model * work.model().d_ff * 4
    assert operator.startswith("aten.")
    assert ":" in code


def test_the_model_is_unchanged_afterwards() -> None:
    """Hooks are removed, and a plain step gives the same gradients."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU())
    optimizer = torch.optim.SGD(model.parameters())
    x = torch.randn(2, 4)
    model(x).sum().backward()
    plain = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    with StorageLedger(CPU, None).watching(model, optimizer):
        model(x).sum().backward()
    recorded = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(plain, recorded, strict=True))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_failing_step_leaves_no_hook_behind() -> None:
    model = torch.nn.Linear(4, 4)
    ledger = StorageLedger(CPU, None)
    with (
        pytest.raises(RuntimeError, match="shapes"),
        ledger.watching(model, torch.optim.SGD(model.parameters())),
    ):
        model(torch.randn(2, 5))
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


class ScriptedAllocator:
    """An allocator whose blocks are 10 bytes larger than the tensors, with a workspace of 1000
    bytes, and with 500 bytes of temporary memory inside each operator."""

    def __init__(self) -> None:
        self.ledger: StorageLedger | None = None

    def allocated(self) -> int:
        assert self.ledger is not None
        return self.ledger.now + 10 + 1000

    def requested(self) -> int:
        return self.allocated() - 10

    def peak(self) -> int:
        return self.allocated() + 500

    def reset_peak(self) -> None:
        pass


def test_the_shares_of_an_allocator_are_lines() -> None:
    allocator = ScriptedAllocator()
    ledger = StorageLedger(CPU, allocator)  # type: ignore[arg-type]
    allocator.ledger = ledger
    model = torch.nn.Linear(8, 8)
    with ledger.watching(model, torch.optim.SGD(model.parameters())):
        ledger.phase("forward", lambda: model(torch.randn(2, 8)))
    (peak,), (end,) = ledger.peaks, ledger.ends
    assert peak.lines[WITHIN_OPERATORS] == 500
    assert peak.unattributed == end.unattributed == 1000, "the workspace is not yet known"
    ledger.library_bytes = 1000
    (peak,), (end,) = ledger.peaks, ledger.ends
    assert peak.lines[LIBRARIES] == end.lines[LIBRARIES] == 1000
    assert peak.unattributed == end.unattributed == 0
    assert end.allocated == peak.allocated - 500 - 2 * (2 * 8 * 4)


def test_a_forward_without_backward_frees_its_memory() -> None:
    """No backward frees the graph of a forward pass; softmax and exp save their outputs."""
    ledger = StorageLedger(CPU, None)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Softmax(-1))
    with ledger.watching(model, torch.optim.SGD(model.parameters())):
        before = ledger.now
        ledger.phase("forward", partial(model, torch.randn(2, 8)))
        gc.collect()
        assert ledger.now == before


def test_a_thread_without_python_frames_gets_the_line_of_the_main_thread() -> None:
    """Like autograd's thread for the backward pass on a GPU, which has no Python frames."""
    ledger, done = StorageLedger(CPU, None), _thread.allocate_lock()
    done.acquire()
    engine: dict[str, Any] = {"ledger": ledger, "done": done}
    code = "def run():\n  ledger.made(8, 'aten.mm.default')\n  done.release()"
    exec(compile(code, "<engine>", "exec"), engine)
    _thread.start_new_thread(engine["run"], ())
    done.acquire()
    assert ledger.largest[2].startswith("test_memory_ledger.py:")


def test_counted_bytes_follow_live_tensors() -> None:
    counter = TensorBytes(CPU)
    with counter:
        a = torch.zeros(256)
        b = a[:16]
        c = a + 1
        assert counter.now == 2048
        del a
        assert counter.now == 2048, "a view keeps the storage"
        del b, c
        gc.collect()
        assert counter.now == 0
    assert counter.peak == 2048
