"""The parts of the fast step as calls of their own, for `benchmarks/energy_by_part.py`.

Each does what the step does of that kind, forward of all blocks and then backward, on random data
of the step's shapes and scale, since power depends on the bits. What the step keeps for its
backward is kept here as well, for each block apart: nothing is found in a cache that would not be.
What the step has just made when it reads it is one tensor for all blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from stepscope.analysis.matmuls import Group, block_groups, head_chunks
from stepscope.attention.api import attention_with
from stepscope.kernels.activation_policy import ALL, NORMS
from stepscope.kernels.feed_forward import gated_back, gated_by
from stepscope.kernels.loss_chunks import padded_columns
from stepscope.kernels.matmul import add_matmul, linear_concat, linear_grad_input, matmul_to_dtype
from stepscope.kernels.norm import Normed, normed_sum
from stepscope.kernels.rope import rotated_parts_
from stepscope.model.config import ModelConfig
from stepscope.model.layers import RotaryEmbedding

Call = Callable[[], object]
NARROW = torch.bfloat16
GRADIENT = 1e-5
"""About what a gradient of a mean over some thousand tokens comes to."""


@dataclass(frozen=True)
class Setting:
    """The step whose parts these are."""

    config: ModelConfig
    batch: int
    device: torch.device
    attention: str = "auto"
    keep: str = ALL
    """What each block keeps for the backward."""
    gradients: torch.dtype = torch.float32
    """In what format the products of a block leave those of weights."""
    narrow: torch.dtype = NARROW
    """What the products read."""

    @property
    def tokens(self) -> int:
        return self.batch * self.config.context

    @property
    def layers(self) -> range:
        return range(self.config.n_layers)

    def random(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=dtype or self.narrow).mul_(scale)

    def weight(self, out: int, into: int, dtype: torch.dtype) -> Tensor:
        """As the model draws them."""
        return self.random(out, into, scale=(2 / (out + into)) ** 0.5, dtype=dtype)

    def stream(self) -> tuple[int, int, int]:
        return self.batch, self.config.context, self.config.d_model


class Products:
    """Weights and inputs of every block, and gradients of outputs that all blocks share."""

    def __init__(self, setting: Setting, *, joined: bool, weights: torch.dtype) -> None:
        config, tokens = setting.config, setting.tokens
        self.groups = block_groups(config, joined=joined)
        widths = {group.reads: group.into for group in self.groups}
        self.inputs = [
            {name: setting.random(tokens, width) for name, width in widths.items()}
            for _ in setting.layers
        ]
        self.weights = [
            {group.name: setting.weight(group.out, group.into, weights) for group in self.groups}
            for _ in setting.layers
        ]
        self.grads = {
            group.name: setting.random(tokens, group.out, scale=GRADIENT) for group in self.groups
        }
        self.head = setting.weight(config.vocab, config.d_model, weights)
        self.last = setting.random(tokens, config.d_model)

    def forward(self) -> Iterator[tuple[int, Group]]:
        return ((n, group) for n in range(len(self.weights)) for group in self.groups)

    def backward(self) -> Iterator[tuple[int, Group]]:
        return reversed(list(self.forward()))


def products(setting: Setting) -> Call:
    """As the joined layers and the loss by chunks make them, from kept copies of the weights."""
    held = Products(setting, joined=True, weights=setting.narrow)
    chunks = head_chunks(setting.config, setting.tokens, joined=True)

    def run() -> object:
        kept = [linear_concat(held.inputs[n][g.reads], (held.weights[n][g.name],))
                for n, g in held.forward()]  # fmt: skip
        kept.append(_head(held, chunks))
        for n, g in held.backward():
            grad = held.grads[g.name]
            linear_grad_input(grad, (held.weights[n][g.name],))
            kept.append(matmul_to_dtype(grad.T, held.inputs[n][g.reads], setting.gradients))
        return kept

    return run


def _head(held: Products, chunks: tuple[int, ...]) -> Tensor:
    """As the loss makes them, but for what it does to the logits; gives the weight's gradient."""
    vocab = held.head.shape[0]
    rows = held.last.new_empty(max(chunks), padded_columns(vocab))
    grad_last = torch.empty_like(held.last)
    total: Tensor | None = None
    for read, grad_read in zip(held.last.split(chunks), grad_last.split(chunks), strict=True):
        logits = rows[: read.shape[0], :vocab]
        torch.mm(read, held.head.T, out=logits)
        torch.mm(logits, held.head, out=grad_read)
        if total is None:
            total = matmul_to_dtype(logits.T, read, torch.float32)
        else:
            add_matmul(total, logits.T, read)
    assert total is not None
    return total


def peers_products(setting: Setting) -> Call:
    """As autocast makes them: each weight apart, cast before and its gradient cast after. The sums
    of gradients towards an input that several read are passes, and not here."""
    held = Products(setting, joined=False, weights=torch.float32)

    def run() -> object:
        narrow: list[dict[str, Tensor]] = [{} for _ in setting.layers]
        kept = []
        for n, g in held.forward():
            narrow[n][g.name] = held.weights[n][g.name].to(setting.narrow)
            kept.append(held.inputs[n][g.reads] @ narrow[n][g.name].T)
        head = held.head.to(setting.narrow)
        logits = held.last @ head.T
        kept.append((logits.T @ held.last).float())
        torch.mm(logits, head)
        for n, g in held.backward():
            grad = held.grads[g.name]
            torch.mm(grad, narrow[n][g.name])
            kept.append((grad.T @ held.inputs[n][g.reads]).float())
        return kept

    return run


def attention(setting: Setting) -> Call:
    """From views of joined projections to the tensor that the output projection reads."""
    attend = attention_with(setting.attention)
    heads, (batch, seq, d) = setting.config.n_heads, setting.stream()
    parts = [setting.random(batch, seq, 3 * d) for _ in setting.layers]
    grad = setting.random(batch, seq, d, scale=GRADIENT)

    def run() -> object:
        kept = []
        for each in parts:
            leaves = [part.requires_grad_() for part in _heads(each.detach(), heads)]
            made = attend(*leaves, is_causal=True)
            kept.append((made.transpose(1, 2).reshape(batch, seq, d), leaves))
        while kept:
            made, leaves = kept.pop()
            torch.autograd.grad(made, leaves, grad)
        return None

    return run


def _heads(parts: Tensor, heads: int) -> list[Tensor]:
    """Queries, keys and values of (batch, seq, 3 · d), as attention reads them."""
    return [x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in parts.chunk(3, dim=-1)]


class _Passes:
    """What a run of the passes gathers for its backward."""

    def __init__(self, narrow: torch.dtype) -> None:
        self.narrow = narrow
        self.leaves: list[Tensor] = []
        self.outputs: list[Tensor] = []
        self.normed: list[Normed] = []

    def leaf(self, x: Tensor) -> Tensor:
        """A gradient of its own, so that none are added up."""
        self.leaves.append(x.detach().requires_grad_())
        return self.leaves[-1]

    def norm(
        self, x: Tensor, branch: Tensor | None, weight: Tensor, *, units: bool = False
    ) -> Tensor:
        added = None if branch is None else self.leaf(branch)
        stream, normed = normed_sum(x, added, self.leaf(weight), out_dtype=self.narrow, units=units)
        self.normed.append(normed)
        self.outputs.append(normed.value)
        return stream

    def norms_again(self) -> None:
        """What a product of the backward reads where the norm itself was not kept."""
        for normed in reversed(self.normed):
            if normed.unit is not None and normed.weight is not None:
                from stepscope.kernels.triton.norm import scaled

                scaled(normed.unit, normed.weight)


def passes(setting: Setting) -> Call:
    """Norms with the sums before them, rotations and SwiGLU; what the backward makes again too. The
    embedding and the losses of rows are not here."""
    config, stream, d = setting.config, setting.stream(), setting.config.d_model
    table = RotaryEmbedding(config.d_head, config.context, config.rope_theta, setting.device)
    weight = torch.ones(d, device=setting.device)
    first = setting.random(*stream, dtype=torch.float32)
    branch, grad_read = setting.random(*stream), setting.random(*stream, scale=GRADIENT)
    parts = [setting.random(*stream[:2], 3 * d) for _ in setting.layers]
    gates = [setting.random(setting.tokens, 2 * config.d_ff) for _ in setting.layers]
    grad_parts = setting.random(*stream[:2], 3 * d, scale=GRADIENT)
    grad_gated = setting.random(setting.tokens, config.d_ff, scale=GRADIENT)
    again = setting.keep != ALL

    def run() -> object:
        made, turned, gated = _Passes(setting.narrow), list[Tensor](), list[Tensor]()
        x = made.leaf(first)
        for n in setting.layers:
            x = made.norm(x, branch if n else None, weight, units=again)
            leaf = made.leaf(parts[n])
            turned += rotated_parts_(leaf, table.cos, table.sin, config.n_heads)
            x = made.norm(x, branch, weight, units=again)
            value = gated_by(gates[n])
            gated += [] if again else [value]
        made.norm(x, branch, weight)
        grads = [grad_read] * len(made.outputs) + _heads(grad_parts, config.n_heads) * len(parts)
        torch.autograd.grad(made.outputs + turned, made.leaves, grads)
        if setting.keep != NORMS:
            made.norms_again()
        for gate in reversed(gates):
            remade = torch.empty_like(grad_gated) if again else None
            gated_back(grad_gated, gate, torch.empty_like(gate), remade)
        return gated

    return run


class Weight(NamedTuple):
    shape: tuple[int, ...]
    copied: bool = False
    """A product reads a copy of it."""
    in_block: bool = False


def weights(config: ModelConfig) -> Iterator[Weight]:
    d = config.d_model
    for _ in range(config.n_layers):
        for group in block_groups(config, joined=False):
            yield Weight((group.out, group.into), copied=True, in_block=True)
        yield from [Weight((d,))] * 2
    yield Weight((d,))
    yield Weight((config.vocab, d))
    yield Weight((config.vocab, d), copied=True)


def updates(setting: Setting) -> Call:
    """AdamW over all parameters as within a backward: a launch for each, copies written along."""
    from stepscope.optim.device_settings import DeviceSettings, Rule
    from stepscope.optim.triton_adamw import update_one

    rows = []
    for shape, copied, in_block in weights(setting.config):
        wide = torch.float32
        parameter = setting.random(*shape, scale=0.02, dtype=wide)
        made = setting.gradients if in_block else wide
        grad = setting.random(*shape, scale=GRADIENT, dtype=made)
        mean, square = setting.random(*shape, scale=GRADIENT, dtype=wide), grad.float().square_()
        rows.append(
            (parameter, grad, mean, square, parameter.to(setting.narrow) if copied else None)
        )
    rule = Rule(lr=1e-5, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=1e-2)
    settings = DeviceSettings([1.0] * len(rows), (rule,) * len(rows), setting.device)

    def run() -> object:
        settings.advance()
        for row, tensors in enumerate(rows):
            update_one(*tensors, settings.rows, row)
        return None

    return run
