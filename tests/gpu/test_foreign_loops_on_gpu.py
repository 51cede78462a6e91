"""Optimizer-in-backward and closures on a GPU, where autograd has a separate thread."""

from __future__ import annotations

from pathlib import Path

import torch

from watched_models import Network, batch, network_flops
from watched_programs import only, watching


def loss_of(model: torch.nn.Module) -> torch.Tensor:
    x, y = (one.cuda() for one in batch())
    return torch.nn.functional.cross_entropy(model(x), y)


def test_optimizers_that_step_in_the_autograd_thread_are_recorded(tmp_path: Path) -> None:
    model = Network().cuda()
    optimizers = {p: torch.optim.AdamW([p], foreach=False) for p in model.parameters()}

    def update(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        optimizers[parameter].zero_grad()  # type: ignore[index]

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    with watching(tmp_path):
        for _ in range(20):
            loss_of(model).backward()
    watched = only(tmp_path)
    assert "recording_failed" not in watched.record.notes
    assert watched.record.quantity("flops") == network_flops(8)
    assert watched.micro_batches == 1
    assert watched.summary is not None
    assert len(watched.summary.steps) == 2
    assert {"forward", "backward", "optimizer"} <= {use.phase for use in watched.summary.uses}
    assert {"forward", "backward", "optimizer"} <= watched.issue_ms.keys()
    assert watched.account is not None


def test_work_of_a_closure_is_not_attributed_to_the_optimizer(tmp_path: Path) -> None:
    model = Network().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    with watching(tmp_path):
        for _ in range(20):
            optimizer.step(closure)  # type: ignore[arg-type]
    watched = only(tmp_path)
    assert watched.summary is not None
    assert not [
        use for use in watched.summary.uses if use.phase == "optimizer" and use.kind == "matmul"
    ]
    assert [use for use in watched.summary.uses if use.phase == "forward" and use.kind == "matmul"]
    assert watched.issue_ms["forward"] > 0
    assert watched.issue_ms["backward"] > 0
