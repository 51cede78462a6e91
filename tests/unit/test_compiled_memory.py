"""Plans and predictions of compiled blocks, against what torch's compiler saves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import stepscope
from stepscope.measure.ledger import line_of_code
from stepscope.planning.block_costs import Example
from stepscope.planning.blocks import repeated_blocks
from stepscope.planning.compiled_blocks import CompiledBlock
from stepscope.planning.fake_step import Fakes
from stepscope.planning.fit import plans_of_step
from stepscope.planning.host_copies import HostCopies
from stepscope.planning.operators import known_rates
from stepscope.planning.selective import AS_IT_IS, BlockPlan, apply_to

WIDTH, ROWS = 64, 256
KEPT = frozenset({("addmm", 0)})


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(self.norm(x))
        out: Tensor = x + self.down(functional.silu(hidden) * hidden.sigmoid())
        return out


def saved_bytes(block: nn.Module, x: Tensor, output: Tensor) -> int:
    """Bytes that the compiled forward saves, without parameters, input and output."""
    outside = {id(one) for one in block.parameters()}
    storages = {x.untyped_storage().data_ptr(), output.untyped_storage().data_ptr()}
    function: Any = output.grad_fn
    return sum(
        one.nbytes
        for one in function.saved_tensors
        if id(one) not in outside and one.untyped_storage().data_ptr() not in storages
    )


@pytest.mark.parametrize("plan", [AS_IT_IS, BlockPlan(True), BlockPlan(True, KEPT)], ids=str)
def test_a_compiled_block_saves_what_its_plan_says(plan: BlockPlan) -> None:
    torch.compiler.reset()
    torch.manual_seed(0)
    block, x = Block(), torch.randn(ROWS, WIDTH, requires_grad=True)
    block(x).square().sum().backward()
    expected = [one.grad for one in (x, *block.parameters())]
    x.grad = None
    block.zero_grad()
    fakes = Fakes(line_of_code)
    with fakes.active():
        fake, _ = fakes.copy(block, None)
        example = Example(fake, (fakes.tensor(x),), {})
        found = CompiledBlock(example, None, known_rates())
        predicted = found.cost(plan).saved + sum(found.retained) - x.nbytes
    apply_to(block, plan, HostCopies(), None)
    block.compile(backend="aot_eager_decomp_partition")
    output = block(x)
    assert saved_bytes(block, x, output) == predicted
    output.square().sum().backward()
    for one, wanted in zip((x, *block.parameters()), expected, strict=True):
        torch.testing.assert_close(one.grad, wanted)


def model_and_batch() -> tuple[nn.Module, torch.optim.Optimizer, Tensor]:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(*(Block() for _ in range(4))))
    return model, torch.optim.SGD(model.parameters(), 0.1), torch.randn(8 * ROWS, WIDTH)


def square(model: nn.Module, batch: Any) -> Tensor:
    loss: Tensor = model(batch).square().mean()
    return loss


def test_compiled_blocks_need_less_than_eager_ones() -> None:
    """Both factors in a block are computed again."""
    model, optimizer, batch = model_and_batch()
    eager = stepscope.predict(model, optimizer, batch, loss_fn=square)
    blocks = stepscope.predict(model, optimizer, batch, loss_fn=square, compile="blocks")
    whole = stepscope.predict(model, optimizer, batch, loss_fn=square, compile="model")
    assert blocks.is_estimate
    assert "estimated" in str(blocks)
    hidden = batch.nbytes * 4
    assert eager.peak.allocated - blocks.peak.allocated > 2 * 2 * hidden
    assert blocks.kinds["saved for backward"] > 2 * 4 * hidden
    assert abs(whole.peak.allocated - blocks.peak.allocated) < hidden


def test_stand_ins_refer_to_no_activations_after_the_backward_pass() -> None:
    model, optimizer, batch = model_and_batch()
    eager = stepscope.predict(model, optimizer, batch, loss_fn=square).phases[-1]
    blocks = stepscope.predict(model, optimizer, batch, loss_fn=square, compile="blocks").phases[-1]
    assert eager.phase == blocks.phase == "optimizer"
    assert eager.allocated == blocks.allocated


def test_plans_of_compiled_blocks_copy_nothing_to_host_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("stepscope.planning.frontier.LEAST_BYTES", 1024)
    model, optimizer, batch = model_and_batch()
    eager = plans_of_step(model, optimizer, batch, loss_fn=square)
    for block in repeated_blocks(model).values():
        block.compile(backend="aot_eager")
    plans = plans_of_step(model, optimizer, batch, loss_fn=square)
    assert any(plan.to_host for plan in eager)
    assert not any(plan.to_host for plan in plans)
    assert plans[0].peak < eager[0].peak
    assert any(cost.plan.recompute for cost in plans[-1].blocks.values())
    fitted = stepscope.fit(
        model, optimizer, batch, budget=int(1.03 * plans[-1].peak), loss_fn=square
    )
    assert fitted.peak == fitted.plan.peak
    fitted.undo()
