"""Memory of a rank under FSDP2 and DDP, against torch's `fully_shard` on a fake process group."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import stepscope
from stepscope.errors import UsageError
from stepscope.measure.ledger import line_of_code
from stepscope.planning.fake_run import FakeStep, MemoryPrediction, StepOptions
from stepscope.planning.fake_step import Fakes
from stepscope.planning.forms import Form
from stepscope.planning.frontier import MemoryPlan
from stepscope.planning.operators import known_rates
from stepscope.planning.plans import plans_of
from stepscope.planning.ranks import ONE_RANK, Ranks
from stepscope.planning.simulated_bytes import WORKSPACE
from stepscope.records.memory import BUCKETS, GATHERED

WIDTH, RANKS = 256, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.relu(self.up(x)))
        return out


class Model(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(512, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, 512, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1).float(), tokens.flatten())


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of all storages at each operator, also of those that FSDP2 resizes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages: dict[int, Any] = {}
        self.peak = 0

    def see(self, tensor: Any) -> None:
        storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
        key = storage._cdata
        forget = lambda _, key=key: self._storages.pop(key, None)  # noqa: E731
        self._storages.setdefault(key, weakref.ref(storage, forget))

    def __torch_dispatch__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, result)):
            if isinstance(leaf, Tensor):
                self.see(leaf)
        alive = [storage for ref in [*self._storages.values()] if (storage := ref()) is not None]
        self.peak = max(self.peak, sum(storage.nbytes() for storage in alive))
        return result


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), foreach=True)


@pytest.fixture
def process_group() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield
    dist.destroy_process_group()


def counted_with_fsdp2(model: Model, tokens: Tensor, dtype: torch.dtype | None) -> int:
    mesh = init_device_mesh("cpu", (RANKS,))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    optimizer = adamw(model)
    for _ in range(2):
        live = LiveBytes()
        with live:
            for one in (*model.parameters(), *tree_leaves([*optimizer.state.values()]), tokens):
                live.see(one)
            model(tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
    return live.peak


def planned(model: Model, tokens: Tensor, ranks: Ranks, dtype: Any = None) -> list[MemoryPlan]:
    fakes = Fakes(line_of_code)
    with fakes.active():
        step = FakeStep.of(fakes, model, adamw(model), tokens, StepOptions(dtype=dtype))
        return plans_of(step, known_rates(), Form(ranks=ranks))


@pytest.mark.parametrize(("dtype", "rows"), [(None, 32), (None, 2048), (torch.bfloat16, 32)])
def test_a_rank_of_fsdp2_has_the_bytes_of_fully_shard(
    process_group: None, dtype: torch.dtype | None, rows: int
) -> None:
    del process_group
    tokens = torch.zeros(1, rows, dtype=torch.long)
    counted = counted_with_fsdp2(Model(3), tokens, dtype)
    plan = planned(Model(3), tokens, Ranks(RANKS, "full"), dtype)[0]
    assert abs(plan.peak - WORKSPACE - counted) < 0.01 * counted


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_prediction_of_a_rank_has_the_peak_of_its_plan(dtype: torch.dtype | None) -> None:
    tokens, model = torch.zeros(1, 32, dtype=torch.long), Model(3)
    found = stepscope.predict(
        model, adamw(model), tokens, loss_fn=lambda model, batch: model(batch), dtype=dtype,
        ranks=RANKS, sharding="full",
    )  # fmt: skip
    assert found.peak.allocated == planned(Model(3), tokens, Ranks(RANKS, "full"), dtype)[0].peak
    assert found.kinds[GATHERED] > 0
    assert found.peak.unattributed == 0


def test_a_prediction_of_ddp_has_a_line_of_its_buckets() -> None:
    tokens, model = torch.zeros(1, 32, dtype=torch.long), Model(2)

    def predicted(ranks: int) -> MemoryPrediction:
        return stepscope.predict(
            model, adamw(model), tokens, loss_fn=lambda model, batch: model(batch), ranks=ranks
        )

    size = sum(p.nbytes for p in model.parameters())
    alone, ddp = predicted(1).peak, predicted(8).peak
    assert ddp.lines[BUCKETS] == ddp.allocated - alone.allocated == size


def test_a_model_that_is_one_graph_is_not_sharded() -> None:
    model = Model(2)
    with pytest.raises(UsageError, match="compiled by itself"):
        stepscope.predict(
            model, adamw(model), torch.zeros(1, 32, dtype=torch.long), compile="model",
            ranks=2, sharding="full",
        )  # fmt: skip


def test_ddp_has_its_buckets_besides() -> None:
    model, tokens = Model(2), torch.zeros(1, 32, dtype=torch.long)
    alone, ddp = (planned(model, tokens, ranks)[0].peak for ranks in (ONE_RANK, Ranks(8)))
    assert ddp - alone == sum(p.nbytes for p in model.parameters())


def test_a_block_more_costs_its_shards_on_many_ranks() -> None:
    """Gathered parameters do not depend on the number of blocks."""
    tokens = torch.zeros(1, 1, dtype=torch.long)
    few, many = (planned(Model(n), tokens, Ranks(64, "full"))[0].peak for n in (4, 12))
    size = sum(p.nbytes for p in Block().parameters())
    # Parameters, gradients and two moments.
    assert many - few == pytest.approx(8 * 4 * size / 64, rel=0.2)


class Matmuls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the matmuls that are traced."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.number = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        del types
        self.number += function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("ranks", [ONE_RANK, Ranks(64, "full")])
def test_a_repeated_block_is_traced_once(ranks: Ranks) -> None:
    """However many there are: 80 blocks of a 70B on 64 ranks take seconds."""
    tokens, counts = torch.zeros(1, 1, dtype=torch.long), []
    for layers in (2, 16):
        with Matmuls() as matmuls:
            planned(Model(layers), tokens, ranks)
        counts.append(matmuls.number)
    assert 0 < counts[0] == counts[1]


def test_ranks_are_checked() -> None:
    with pytest.raises(UsageError, match="ranks=0"):
        Ranks(0).require_valid()
    with pytest.raises(UsageError, match="one rank"):
        Ranks(1, "full").require_valid()
