"""The parts of the fast step as separate calls, for `benchmarks/energy_by_part.py`.

Each part does what the step does of that kind, the forward of all blocks and then the backward, on
random data of the step's shapes and scale, because power depends on the bits. Tensors that the step
saves for its backward are saved here per block as well, so that there are no additional cache hits.
Tensors that the step has just written when it reads them are shared by all blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from matmuls import Group, block_groups, head_chunks
from torch import Tensor

from stepscope.attention.api import attention_with
from stepscope.kernels.activation import SILU, activated, write_gradients
from stepscope.kernels.activation_policy import ALL, NORMS
from stepscope.kernels.loss_chunks import padded_columns
from stepscope.kernels.matmul import add_matmul, linear_concat, linear_grad_input, matmul_to_dtype
from stepscope.kernels.norm import Normed, normed_sum
from stepscope.kernels.rope import rotated_parts_
from stepscope.model.config import ModelConfig
from stepscope.model.layers import RotaryEmbedding

Call = Callable[[], object]
NARROW = torch.bfloat16
GRADIENT = 1e-5
"""Typical magnitude of a gradient of a mean over some thousand tokens."""


@dataclass(frozen=True)
class Setting:
    """The step that the parts belong to."""

    config: ModelConfig
    batch: int
    device: torch.device
    attention: str = "auto"
    activation_policy: str = ALL
    """Activation policy: what each block saves for the backward."""
    gradients: torch.dtype = torch.float32
    """Dtype of the weight gradients that the GEMMs of a block write."""
    narrow: torch.dtype = NARROW
    """Dtype of the GEMM inputs."""

    @property
    def tokens(self) -> int:
        return self.batch * self.config.context

    @property
    def layers(self) -> range:
        return range(self.config.n_layers)

    def random(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=dtype or self.narrow).mul_(scale)

    def weight(self, out: int, into: int, dtype: torch.dtype) -> Tensor:
        """Initialize a weight as the model does."""
        return self.random(out, into, scale=(2 / (out + into)) ** 0.5, dtype=dtype)

    def stream(self) -> tuple[int, int, int]:
        return self.batch, self.config.context, self.config.d_model


class Operands:
    """Weights and inputs of every block, and output gradients shared by all blocks."""

    def __init__(self, setting: Setting, *, fused_projections: bool, weights: torch.dtype) -> None:
        config, tokens = setting.config, setting.tokens
        self.groups = block_groups(config, fused_projections=fused_projections)
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


def gemms(setting: Setting) -> Call:
    """GEMMs of the fused layers and the chunked loss, from stored 16-bit copies of the weights."""
    operands = Operands(setting, fused_projections=True, weights=setting.narrow)
    chunks = head_chunks(setting.config, setting.tokens, fused_projections=True)

    def run() -> object:
        outputs = [
            linear_concat(operands.inputs[n][g.reads], (operands.weights[n][g.name],))
            for n, g in operands.forward()
        ]
        outputs.append(_head(operands, chunks))
        for n, g in operands.backward():
            grad = operands.grads[g.name]
            linear_grad_input(grad, (operands.weights[n][g.name],))
            outputs.append(matmul_to_dtype(grad.T, operands.inputs[n][g.reads], setting.gradients))
        return outputs

    return run


def _head(operands: Operands, chunks: tuple[int, ...]) -> Tensor:
    """GEMMs of the head and loss, without the work on the logits; returns the weight gradient."""
    vocab = operands.head.shape[0]
    rows = operands.last.new_empty(max(chunks), padded_columns(vocab))
    grad_last = torch.empty_like(operands.last)
    total: Tensor | None = None
    for read, grad_read in zip(operands.last.split(chunks), grad_last.split(chunks), strict=True):
        logits = rows[: read.shape[0], :vocab]
        torch.mm(read, operands.head.T, out=logits)
        torch.mm(logits, operands.head, out=grad_read)
        if total is None:
            total = matmul_to_dtype(logits.T, read, torch.float32)
        else:
            add_matmul(total, logits.T, read)
    assert total is not None
    return total


def peers_gemms(setting: Setting) -> Call:
    """GEMMs under autocast: a separate one per weight, which is cast before; its gradient is cast
    after. Sums of gradients of a shared input are passes and not included."""
    operands = Operands(setting, fused_projections=False, weights=torch.float32)

    def run() -> object:
        narrow: list[dict[str, Tensor]] = [{} for _ in setting.layers]
        outputs = []
        for n, g in operands.forward():
            narrow[n][g.name] = operands.weights[n][g.name].to(setting.narrow)
            outputs.append(operands.inputs[n][g.reads] @ narrow[n][g.name].T)
        head = operands.head.to(setting.narrow)
        logits = operands.last @ head.T
        outputs.append((logits.T @ operands.last).float())
        torch.mm(logits, head)
        for n, g in operands.backward():
            grad = operands.grads[g.name]
            torch.mm(grad, narrow[n][g.name])
            outputs.append((grad.T @ operands.inputs[n][g.reads]).float())
        return outputs

    return run


def attention(setting: Setting) -> Call:
    """Attention from views of the fused QKV projection to the input of the output projection."""
    attend = attention_with(setting.attention)
    heads, (batch, seq, d) = setting.config.n_heads, setting.stream()
    parts = [setting.random(batch, seq, 3 * d) for _ in setting.layers]
    grad = setting.random(batch, seq, d, scale=GRADIENT)

    def run() -> object:
        saved = []
        for each in parts:
            leaves = [part.requires_grad_() for part in _heads(each.detach(), heads)]
            output = attend(*leaves, is_causal=True)
            saved.append((output.transpose(1, 2).reshape(batch, seq, d), leaves))
        while saved:
            output, leaves = saved.pop()
            torch.autograd.grad(output, leaves, grad)
        return None

    return run


def _heads(parts: Tensor, heads: int) -> list[Tensor]:
    """Views of queries, keys and values in (batch, seq, 3 · d), as attention reads them."""
    return [x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in parts.chunk(3, dim=-1)]


class _Passes:
    """Tensors that the passes save for their backward."""

    def __init__(self, narrow: torch.dtype) -> None:
        self.narrow = narrow
        self.leaves: list[Tensor] = []
        self.outputs: list[Tensor] = []
        self.normed: list[Normed] = []

    def leaf(self, x: Tensor) -> Tensor:
        """Create a separate leaf, so that gradients are not accumulated."""
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
        """Recompute the norms that the GEMMs of the backward read if they were not saved."""
        for normed in reversed(self.normed):
            if normed.unit is not None and normed.weight is not None:
                from stepscope.kernels.triton.norm import scaled

                scaled(normed.unit, normed.weight)


def passes(setting: Setting) -> Call:
    """Norms with the preceding residual additions, rotary embeddings and SwiGLU, including what the
    backward recomputes. The embedding and the per-row losses are not included."""
    config, stream, d = setting.config, setting.stream(), setting.config.d_model
    table = RotaryEmbedding(config.d_head, config.context, config.rope_theta, setting.device)
    weight = torch.ones(d, device=setting.device)
    first = setting.random(*stream, dtype=torch.float32)
    branch, grad_read = setting.random(*stream), setting.random(*stream, scale=GRADIENT)
    parts = [setting.random(*stream[:2], 3 * d) for _ in setting.layers]
    gates = [setting.random(setting.tokens, 2 * config.d_ff) for _ in setting.layers]
    grad_parts = setting.random(*stream[:2], 3 * d, scale=GRADIENT)
    grad_gated = setting.random(setting.tokens, config.d_ff, scale=GRADIENT)
    again = setting.activation_policy != ALL

    def run() -> object:
        state, turned, gated = _Passes(setting.narrow), list[Tensor](), list[Tensor]()
        x = state.leaf(first)
        for n in setting.layers:
            x = state.norm(x, branch if n else None, weight, units=again)
            leaf = state.leaf(parts[n])
            turned += rotated_parts_(leaf, table.cos, table.sin, config.n_heads)
            x = state.norm(x, branch, weight, units=again)
            value = activated(*gates[n].chunk(2, dim=1), SILU)
            gated += [] if again else [value]
        state.norm(x, branch, weight)
        grads = [grad_read] * len(state.outputs) + _heads(grad_parts, config.n_heads) * len(parts)
        torch.autograd.grad(state.outputs + turned, state.leaves, grads)
        if setting.activation_policy != NORMS:
            state.norms_again()
        for gate in reversed(gates):
            recomputed = torch.empty_like(grad_gated) if again else None
            grads = torch.empty_like(gate).chunk(2, dim=1)
            write_gradients(grad_gated, *gate.chunk(2, dim=1), *grads, SILU, recomputed)
        return gated

    return run


class Weight(NamedTuple):
    shape: tuple[int, ...]
    copied: bool = False
    """True if a GEMM reads a 16-bit copy of it."""
    in_block: bool = False


def weights(config: ModelConfig) -> Iterator[Weight]:
    d = config.d_model
    for _ in range(config.n_layers):
        for group in block_groups(config, fused_projections=False):
            yield Weight((group.out, group.into), copied=True, in_block=True)
        yield from [Weight((d,))] * 2
    yield Weight((d,))
    yield Weight((config.vocab, d))
    yield Weight((config.vocab, d), copied=True)


def updates(setting: Setting) -> Call:
    """AdamW over all parameters as optimizer-in-backward: one launch each, which also writes the
    16-bit copies."""
    from stepscope.optim.device_settings import DeviceSettings, Rule
    from stepscope.optim.triton_adamw import update_one

    rows = []
    for shape, copied, in_block in weights(setting.config):
        wide = torch.float32
        parameter = setting.random(*shape, scale=0.02, dtype=wide)
        dtype = setting.gradients if in_block else wide
        grad = setting.random(*shape, scale=GRADIENT, dtype=dtype)
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
