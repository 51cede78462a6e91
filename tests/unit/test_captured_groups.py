"""CUDA graphs in process groups: of NCCL, where they are asked for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import fully_shard

from stepscope.acceleration.graphs.groups import why_not_captured

in_group = pytest.mark.usefixtures("group")


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def use_backend(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    known = distributed_c10d._world.pg_map
    monkeypatch.setattr(
        distributed_c10d, "_pg_map", {one: (name, store) for one, (_, store) in known.items()}
    )


def test_a_step_of_one_process_is_captured() -> None:
    assert why_not_captured([], asked_for=False) is None


@in_group
def test_gloo_waits_for_the_host() -> None:
    reason = why_not_captured([], asked_for=True)
    assert reason is not None
    assert "gloo, whose collectives wait for the host" in reason


@in_group
@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_nccl_is_captured_where_it_is_asked_for(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_backend(backend, monkeypatch)
    assert why_not_captured([nn.Linear(2, 2)], asked_for=True) is None
    assert 'only with graph="on"' in str(why_not_captured([], asked_for=False))


@in_group
def test_fsdp2_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    model = fully_shard(nn.Linear(2, 2))
    use_backend("nccl", monkeypatch)
    assert "FSDP2" in str(why_not_captured([model], asked_for=True))
