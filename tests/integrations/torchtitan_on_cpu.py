"""torchtitan's trainer on gloo ranks of a CPU: what it asks of a GPU, and a small Llama 3.

python torchtitan_on_cpu.py --module torchtitan_on_cpu --config small     # under torchrun
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed
from torch.distributed.fsdp import FSDPModule

STEPS, LENGTH, TOKENS = 12, 32, 64


def pretend() -> None:
    """Let a CPU answer what torchtitan asks an accelerator; torch 2.13 has no `set_timeout`."""
    device: Any = torch.cpu
    torch._utils._get_available_device_type = lambda: "cpu"
    torch._utils._get_device_module = lambda _: device
    device.current_device, device.memory_stats = lambda: 0, lambda *_: {}
    device.get_device_name = lambda *_: "cpu"
    device.get_device_properties = lambda *_: SimpleNamespace(total_memory=1 << 30)
    for name in ("reset_peak_memory_stats", "empty_cache", "set_device"):
        setattr(device, name, lambda *_: None)
    if not hasattr(torch.distributed, "set_timeout"):
        torch.distributed.set_timeout = lambda *_: None


pretend()

from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.components.metrics import MetricsProcessor  # noqa: E402
from torchtitan.components.optimizer import default_adamw  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.config.configs import DebugConfig  # noqa: E402
from torchtitan.models.common import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3 import model_registry  # noqa: E402
from torchtitan.models.llama3.parallelize import parallelize_llama  # noqa: E402
from torchtitan.train import main  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402


class NoTokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        del config
        super().__init__()

    def encode(self, *_: Any, **__: Any) -> list[int]:
        raise NotImplementedError

    def decode(self, *_: Any, **__: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        return TOKENS


class RandomTokens(BaseDataLoader):
    """Sequences whose second half repeats the first, others on each rank."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config: Config, *, dp_rank: int, local_batch_size: int, **_: Any) -> None:
        del config
        self._rank, self._rows = dp_rank, local_batch_size

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        generator = torch.Generator().manual_seed(self._rank)
        while True:
            half = torch.randint(TOKENS, (self._rows, LENGTH // 2 + 1), generator=generator)
            tokens = torch.cat((half, half), dim=1)[:, : LENGTH + 1]
            yield {"input": tokens[:, :-1]}, tokens[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


def parallelize(model: Any, **options: Any) -> Any:
    sharded = parallelize_llama(model, **options)
    for one in sharded.modules():
        if isinstance(one, FSDPModule):
            # gloo cannot divide in a reduction.
            one.set_force_sum_reduction_for_comms(True)
    return sharded


def small() -> Trainer.Config:
    spec = model_registry("debugmodel")
    spec.parallelize_fn = parallelize
    del spec.model.layers[2:]
    for layer in spec.model.layers:
        # FlexAttention needs a GPU.
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return Trainer.Config(
        model_spec=spec,
        loss=CrossEntropyLoss.Config(),
        tokenizer=NoTokenizer.Config(),
        dataloader=RandomTokens.Config(),
        optimizer=default_adamw(lr=1e-3),
        training=TrainingConfig(
            local_batch_size=2,
            seq_len=LENGTH,
            steps=STEPS,
            disable_cuda_graphs=True,
            mixed_precision_param="float32",
        ),
        metrics=MetricsProcessor.Config(log_freq=1, disable_color_printing=True),
        activation_checkpoint=None,
        compile=CompileConfig(enable=False),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        debug=DebugConfig(seed=0),
    )


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[2] / "examples"))
    main()
