"""Training of a small decoder in FSDP2 and in DDP, accelerated through the graph backend, on any
backend of process groups: what is compared with the same training in one process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import stepscope
from small_decoder import Decoder, adamw, decoder
from stepscope.parallel import World

STEPS = 20
VOCAB = 50
FIXED = {"compiler": "aot_eager", "form": "compiled with passes"}
"""Fast to compile, and not chosen by time."""


@dataclass(frozen=True)
class Case:
    """How the decoder is trained."""

    wrap: Callable[[Decoder, World], nn.Module]
    accumulate: int = 1
    max_norm: float | None = None
    before: bool = False
    """It is accelerated before it is sharded."""
    tolerance: float = 1e-4
    reentrant: bool | None = None
    train_step: bool = False
    """A `TrainStep` runs it, with a loss function."""
    varied: bool = False
    """Every third batch is longer, and those of every other rank in other steps."""


def fsdp2(model: Decoder, world: World) -> nn.Module:
    del world
    return sharded(model)


def sharded(model: Decoder, **options: Any) -> nn.Module:
    for layer in model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def fsdp2_kept(model: Decoder, world: World) -> nn.Module:
    del world
    return sharded(model, reshard_after_forward=False)


def fsdp2_bfloat16(model: Decoder, world: World) -> nn.Module:
    del world
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return sharded(model, mp_policy=policy)


def fsdp2_checkpointed(model: Decoder, world: World) -> nn.Module:
    del world
    for at, layer in enumerate(model.layers):
        model.layers[at] = checkpoint_wrapper(layer)
    return sharded(model)


def fsdp2_blocks_alone(model: Decoder, world: World) -> nn.Module:
    """Leave embedding and head whole, with their gradients averaged by hooks."""
    for layer in model.layers:
        fully_shard(layer)
    for p in (*model.embed.parameters(), *model.norm.parameters(), *model.head.parameters()):
        p.register_hook(lambda gradient: _averaged(gradient, world))
    return model


def _averaged(gradient: Tensor, world: World) -> Tensor:
    torch.distributed.all_reduce(gradient)
    return gradient / world.size


def hybrid(model: Decoder, world: World) -> nn.Module:
    mesh = init_device_mesh(
        world.device.type, (2, world.size // 2), mesh_dim_names=("replicate", "shard")
    )
    return sharded(model, mesh=mesh)


def ddp(model: Decoder, world: World) -> nn.Module:
    del world
    return DistributedDataParallel(model)


def ddp_views(model: Decoder, world: World) -> nn.Module:
    del world
    return DistributedDataParallel(
        model, gradient_as_bucket_view=True, static_graph=True, bucket_cap_mb=1
    )


CASES = {
    "fsdp2": Case(fsdp2, varied=True),
    "weights kept": Case(fsdp2_kept),
    "before sharding": Case(fsdp2, before=True),
    "bfloat16 policy": Case(fsdp2_bfloat16, tolerance=3e-2),
    "accumulation and clipping": Case(fsdp2, accumulate=2, max_norm=0.5),
    "checkpointed": Case(fsdp2_checkpointed),
    "checkpointed by the model": Case(fsdp2, reentrant=False),
    "blocks alone": Case(fsdp2_blocks_alone),
    "TrainStep": Case(fsdp2, train_step=True),
    "DDP": Case(ddp),
    "DDP with views": Case(ddp_views, max_norm=0.5),
    "DDP with no_sync": Case(ddp, accumulate=2),
}
FOUR = {"fsdp2": Case(fsdp2), "hybrid": Case(hybrid)}


def batch(case: Case, step: int, rank: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the batch of a rank."""
    generator = torch.Generator().manual_seed(100 * rank + step)
    length = 6 if case.varied and (step + rank) % 3 == 2 else 4
    tokens = torch.randint(VOCAB, (2, 2, length), generator=generator).to(device)
    return tokens[0], tokens[1]


@dataclass
class Result:
    """What a rank has seen, and the parameters after the last step."""

    losses: list[float]
    norms: list[float]
    parameters: dict[str, Tensor]
    report: str = ""


def loss_of(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    loss: Tensor = model(*batch)
    return loss * 1.0


class Training:
    """Training as one of several ranks; `accelerated` goes to `accelerate`, if there is any."""

    def __init__(self, world: World, case: Case, **accelerated: Any) -> None:
        torch._dynamo.reset()
        self._world, self._case = world, case
        model = decoder(tied=False, reentrant=case.reentrant).to(world.device)
        self.report = (
            stepscope.accelerate(model, **accelerated) if case.before and accelerated else None
        )
        self.model: Any = case.wrap(model, world)
        self.optimizer = adamw(self.model)
        if accelerated and not case.before:
            self.report = stepscope.accelerate(self.model, self.optimizer, **accelerated)
        self._step: Any = None
        if case.train_step:
            self._step = stepscope.TrainStep(
                self.model, self.optimizer, loss_fn=loss_of, graph="off"
            )
        self._result = Result([], [], {})

    def run(self, numbers: range) -> None:
        for number in numbers:
            self._world.step(number)
            batches = [
                batch(self._case, number * self._case.accumulate + part, self._world.rank,
                      self._world.device)
                for part in range(self._case.accumulate)
            ]  # fmt: skip
            if self._step is not None:
                self._result.losses.append(sum(float(self._step(ids)) for ids in batches))
            else:
                self._run_step(batches)

    def _run_step(self, batches: list[tuple[Tensor, Tensor]]) -> None:
        total = 0.0
        for part, ids in enumerate(batches):
            with _synchronized(self.model, last=part == len(batches) - 1):
                loss = self.model(*ids) / len(batches)
                loss.backward()
            total += float(loss.detach())
        self._result.losses.append(total)
        self._result.norms.append(_norm(self.model))
        if self._case.max_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self._case.max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def result(self) -> Result:
        parameters = {
            name.replace("_checkpoint_wrapped_module.", "").removeprefix("module."): x.detach()
            for name, x in self.model.named_parameters()
        }
        self._result.parameters = {name: _whole(x) for name, x in parameters.items()}
        self._result.report = str(self.report)
        return self._result


def trained(world: World, case: Case, steps: int = STEPS, **accelerated: Any) -> Result:
    training = Training(world, case, **accelerated)
    training.run(range(steps))
    return training.result()


def _synchronized(wrapped: Any, last: bool) -> Any:
    if hasattr(wrapped, "no_sync"):
        return nullcontext() if last else wrapped.no_sync()
    if hasattr(wrapped, "set_requires_gradient_sync"):
        wrapped.set_requires_gradient_sync(last)
    return nullcontext()


def _norm(model: nn.Module) -> float:
    gradients = [_whole(p.grad).double() for p in model.parameters()]
    return float(sum(x.square().sum() for x in gradients) ** 0.5)


def _whole(x: Any) -> Tensor:
    whole: Tensor = x.full_tensor() if hasattr(x, "full_tensor") else x
    return whole.cpu()


def alone(
    case: Case, ranks: int, device: torch.device, steps: int = STEPS, **accelerated: Any
) -> list[Result]:
    """Train unsharded on the batches of all ranks, and return what each rank should see."""
    torch._dynamo.reset()
    model = decoder(tied=False, reentrant=case.reentrant).to(device)
    optimizer = adamw(model)
    if accelerated:
        stepscope.accelerate(model, optimizer, **accelerated)
    results = [Result([], [], {}) for _ in range(ranks)]
    for number in range(steps):
        for rank, result in enumerate(results):
            loss = 0.0
            for part in range(case.accumulate):
                one = model(*batch(case, number * case.accumulate + part, rank, device))
                (one / case.accumulate / ranks).backward()
                loss += float(one.detach()) / case.accumulate
            result.losses.append(loss)
        limit = case.max_norm or float("inf")
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), limit))
        for result in results:
            result.norms.append(norm)
        optimizer.step()
        optimizer.zero_grad()
    for result in results:
        result.parameters = {name: x.detach().cpu() for name, x in model.named_parameters()}
    return results
