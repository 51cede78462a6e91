"""FSDP2 in a loop of your own, under torchrun, observed on every rank.

    torchrun --nproc-per-node 8 examples/fsdp2.py --size real
    torchrun --nproc-per-node 2 examples/fsdp2.py --device cpu      # two gloo ranks
    stepscope trace stepscope-out/observer                          # meanwhile or afterwards

`--slow RANK` makes one rank slower, to see how it is reported. `--accelerate` compiles each block
within FSDP's hooks, with fused attention.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import stepscope

SIZES = {
    "tiny": {"vocab": 256, "length": 32, "layers": 2, "width": 64, "heads": 4, "batch": 4},
    "real": {"vocab": 32_000, "length": 2048, "layers": 16, "width": 2048, "heads": 16, "batch": 4},
}


class Decoder(nn.Module):
    def __init__(self, vocab: int, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, x.device, x.dtype)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        logits: Tensor = self.head(x)
        return logits


class Tokens(Dataset[Tensor]):
    """Random sequences of a few tokens, whose second half repeats the first."""

    def __init__(self, vocab: int, length: int) -> None:
        self.vocab, self.length = vocab, length

    def __len__(self) -> int:
        return 1 << 16

    def __getitem__(self, index: int) -> Tensor:
        generator = torch.Generator().manual_seed(index)
        half = torch.randint(self.vocab // 8, (self.length // 2 + 1,), generator=generator)
        return torch.cat([half, half])[: self.length + 1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--folder", default="stepscope-out/observer")
    parser.add_argument("--slow", type=int, default=-1, metavar="RANK")
    parser.add_argument("--accelerate", action="store_true")
    args = parser.parse_args()
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    torch.manual_seed(0)
    shape = dict(SIZES[args.size])
    length, batch_size = shape.pop("length"), shape.pop("batch")
    with torch.device(args.device):
        model = Decoder(**shape)
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if args.accelerate:
        report = stepscope.accelerate(model, optimizer, compile=True)
    data = Tokens(shape["vocab"], length)
    batches = iter(DataLoader(data, batch_size, sampler=DistributedSampler(data)))

    observer = stepscope.Observer(args.folder)
    for number in range(args.steps):
        tokens = next(batches).to(args.device, non_blocking=True)
        logits = model(tokens[:, :-1]).flatten(0, 1).float()
        loss = nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())
        if dist.get_rank() == args.slow:
            time.sleep(0.02)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if number in (0, args.steps - 1):
            mean = loss.detach()
            dist.all_reduce(mean, dist.ReduceOp.SUM)
            if dist.get_rank() == 0:
                print(f"step {number + 1}: loss {mean.item() / dist.get_world_size():.4f}")
    observer.close()
    if args.accelerate and dist.get_rank() == 0:
        print(report)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
