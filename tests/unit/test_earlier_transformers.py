"""Forms of models of transformers 4.57, the earliest supported version, in plain torch: blocks that
return tuples, blocks that get two kinds of rotary positions, and masks of encoders."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import stepscope
from stepscope.acceleration.pieces import attention_masks, norm

WIDTH, HEADS, VOCAB, LENGTH = 16, 4, 30, 6
BLOCK = "residual block"


@pytest.fixture(autouse=True)
def _without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


class Attention(nn.Module):
    """Causal, with a padding mask; its positions are a bias of the keys."""

    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        output_attentions: bool = False,
        position_embeddings: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        q, k, v = (
            x.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for x in (self.q(hidden_states), *self.kv(hidden_states).chunk(2, -1))
        )
        if position_embeddings is not None:
            k = k + position_embeddings[:, None]
        hidden = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
        scores = (q @ k.transpose(-2, -1)).masked_fill(hidden, -1e9)
        weights = torch.softmax(scores if attention_mask is None else scores + attention_mask, -1)
        out = (weights @ v).transpose(1, 2).flatten(2)
        return out, weights if output_attentions else None


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))


class Sequential(nn.Module):
    """A block with the parts of GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2, self.mlp = (
            nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH), mlp()
        )  # fmt: skip

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        output_attentions: bool | None = False,
        **kwargs: Any,
    ) -> tuple[Any, ...]:
        x = self.ln_1(hidden_states)
        branch, weights = self.attn(
            x, attention_mask=attention_mask, output_attentions=output_attentions, **kwargs
        )
        x = branch + hidden_states
        return (x + self.mlp(self.ln_2(x)), weights)[: 1 + bool(output_attentions)]


class Parallel(nn.Module):
    """A block with the parts of Phi."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.self_attn, self.mlp, self.resid_dropout = (
            nn.LayerNorm(WIDTH), Attention(), mlp(), nn.Dropout(0.0)
        )  # fmt: skip

    def forward(
        self, hidden_states: Tensor, output_attentions: bool | None = False, **kwargs: Any
    ) -> tuple[Any, ...]:
        x = self.input_layernorm(hidden_states)
        branch, weights = self.self_attn(x, output_attentions=output_attentions, **kwargs)
        branch = self.resid_dropout(branch) + self.resid_dropout(self.mlp(x))
        return (branch + hidden_states, weights)[: 1 + bool(output_attentions)]


class TwoPositions(nn.Module):
    """A block with the parts of Gemma 3: it chooses the positions of its kind of attention."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            self.add_module(f"{name}_layernorm", nn.LayerNorm(WIDTH))
        self.self_attn, self.mlp = Attention(), mlp()

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings_global: Tensor,
        position_embeddings_local: Tensor,
        output_attentions: bool | None = False,
        **kwargs: Any,
    ) -> tuple[Any, ...]:
        sliding = self.self_attn.is_sliding
        branch, weights = self.self_attn(
            self.input_layernorm(hidden_states),
            output_attentions=output_attentions,
            position_embeddings=position_embeddings_local
            if sliding
            else position_embeddings_global,
            **kwargs,
        )
        x = hidden_states + self.post_attention_layernorm(branch)
        branch = self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        return (x + branch, weights)[: 1 + bool(output_attentions)]


class Decoder(nn.Module):
    """Returns the loss, and the attention weights that its blocks return."""

    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(VOCAB, WIDTH), nn.ModuleList([block(), block()])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)
        self.checkpointed: dict[str, bool] | None = None
        if block is TwoPositions:
            self.layers[0].self_attn.is_sliding = True  # type: ignore[union-attr]

    def forward(
        self,
        input_ids: Tensor,
        padding: Tensor | None = None,
        output_attentions: bool = False,
        use_cache: bool | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        x, weights = self.embed(input_ids), []
        given: dict[str, Any] = {"output_attentions": output_attentions, "use_cache": use_cache}
        given["attention_mask"] = None if padding is None else (padding[:, None, None] - 1) * 1e9
        if isinstance(self.layers[0], TwoPositions):
            steps = torch.arange(LENGTH)[None, :, None] * torch.ones(WIDTH // HEADS)
            given["position_embeddings_global"] = (0.1 * steps).cos()
            given["position_embeddings_local"] = steps.cos()
        for layer in self.layers:
            if self.checkpointed is None:
                outputs = layer(x, **given)
            else:
                outputs = checkpoint(
                    lambda x, layer=layer: layer(x, **given), x, **self.checkpointed
                )
            x = outputs[0]
            weights += outputs[1:]
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), input_ids.flatten()), weights


def created(block: type[nn.Module]) -> tuple[Decoder, Decoder]:
    torch.manual_seed(0)
    plain = Decoder(block)
    return plain, copy.deepcopy(plain)


def tokens(seed: int) -> Tensor:
    return torch.randint(VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(seed))


def assert_same(plain: Decoder, fused: Decoder, calls: int = 3, **given: Any) -> None:
    for seed in range(calls):
        results = []
        for one in (plain, fused):
            one.zero_grad()
            loss, weights = one(tokens(seed), **given)
            (loss + sum(x.square().sum() for x in weights)).backward()
            gradients = [p.grad for p in one.parameters()]
            results.append([loss.detach(), *(x.detach() for x in weights), *gradients])
        torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-6)


@pytest.fixture
def adds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The adds that were computed together with a norm: in a block, or at the end of one."""
    seen: list[str] = []
    within, across = norm.normed_sum, norm.sum_before_norm

    def normed_sum(x: Tensor, branch: Tensor | None, *args: Any, **options: Any) -> Any:
        seen.extend(["within"] if branch is not None else [])
        return within(x, branch, *args, **options)

    def sum_before_norm(*args: Any, **options: Any) -> Any:
        seen.append("across")
        return across(*args, **options)

    monkeypatch.setattr(norm, "normed_sum", normed_sum)
    monkeypatch.setattr(norm, "sum_before_norm", sum_before_norm)
    return seen


FORMS = pytest.mark.parametrize("block", [Sequential, Parallel, TwoPositions])


def fused_adds(block: type[nn.Module]) -> list[str]:
    return ["across"] * 2 if block is Parallel else ["within", "across"] * 2


@FORMS
def test_a_block_that_returns_a_tuple(block: type[nn.Module], adds: list[str]) -> None:
    plain, fused = created(block)
    report = stepscope.accelerate(fused)
    assert_same(plain, fused)
    adds.clear()
    assert_same(plain, fused, 1)
    assert adds == fused_adds(block)
    assert report.replaced[BLOCK] == ["layers.0", "layers.1"]
    assert not [left for left in report.left if left.piece == BLOCK]
    padding = torch.ones(2, LENGTH)
    padding[1, 4:] = 0
    assert_same(plain, fused, padding=padding)
    report.undo()
    adds.clear()
    assert_same(plain, fused)
    assert adds == []


@FORMS
def test_weights_that_a_call_asks_for(block: type[nn.Module], adds: list[str]) -> None:
    plain, fused = created(block)
    report = stepscope.accelerate(fused)
    assert_same(plain, fused)
    adds.clear()
    assert_same(plain, fused, output_attentions=True)
    assert adds == []
    assert_same(plain, fused)
    adds.clear()
    assert_same(plain, fused, 1)
    assert adds == fused_adds(block)
    assert report.replaced[BLOCK] == ["layers.0", "layers.1"]


@FORMS
def test_weights_that_the_first_call_asks_for(block: type[nn.Module], adds: list[str]) -> None:
    plain, fused = created(block)
    report = stepscope.accelerate(fused)
    assert_same(plain, fused, output_attentions=True)
    assert adds == []
    assert {left.reason for left in report.left if left.piece == BLOCK} == {
        "its argument output_attentions has another value"
    }
    assert_same(plain, fused)
    adds.clear()
    assert_same(plain, fused, 1)
    assert adds == fused_adds(block)


def test_another_kind_of_positions_later(adds: list[str]) -> None:
    """The block reads it from its attention."""
    plain, fused = created(TwoPositions)
    report = stepscope.accelerate(fused)
    assert_same(plain, fused)
    for one in (plain, fused):
        one.layers[1].self_attn.is_sliding = True  # type: ignore[union-attr]
    adds.clear()
    assert_same(plain, fused)
    assert adds.count("within") == 3
    assert report.replaced[BLOCK] == ["layers.0", "layers.1"]


def test_another_flag_that_adds_no_output(adds: list[str]) -> None:
    """Its first call runs the original, which shows what is returned with it."""
    plain, fused = created(Sequential)
    stepscope.accelerate(fused)
    assert_same(plain, fused)
    adds.clear()
    assert_same(plain, fused, 1, use_cache=True)
    assert adds == []
    assert_same(plain, fused, 2, use_cache=True)
    adds.clear()
    assert_same(plain, fused, 1, use_cache=True)
    assert adds == fused_adds(Sequential)


@FORMS
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_blocks_that_return_tuples(block: type[nn.Module], reentrant: bool) -> None:
    plain, fused = created(block)
    report = stepscope.accelerate(fused)
    for one in (plain, fused):
        one.checkpointed = {"use_reentrant": reentrant}
    assert_same(plain, fused)
    assert report.replaced[BLOCK] == ["layers.0", "layers.1"]


capturing = False


def _prepare_4d_attention_mask_for_sdpa(
    mask: Tensor, dtype: torch.dtype, tgt_len: int
) -> Tensor | None:
    """As in transformers 4.57: no mask if no token is padding, which a capture cannot read."""
    assert not capturing, "reads a tensor"
    if torch.all(mask == 1):
        return None
    hidden = 1 - mask[:, None, None].expand(-1, 1, tgt_len, -1).to(dtype)
    return hidden * torch.finfo(dtype).min


class Encoder(nn.Module):
    """Returns the mask, and that of another encoder to which it attends."""

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
    ) -> list[Tensor | None]:
        del position_ids
        batch, seq = input_ids.shape
        ones = torch.ones(batch, seq)
        masks = [ones if attention_mask is None else attention_mask]
        if encoder_attention_mask is not None:
            masks.append(encoder_attention_mask)
        return [_prepare_4d_attention_mask_for_sdpa(one, torch.float32, seq) for one in masks]


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Behave as in the capture of a CUDA graph."""

    def begin() -> None:
        monkeypatch.setattr(attention_masks, "is_capturing", lambda: True)
        monkeypatch.setitem(globals(), "capturing", True)

    return begin


def test_a_capture_of_an_encoder_has_the_mask_of_its_eager_calls(
    capture: Callable[[], None],
) -> None:
    model = nn.Sequential(Encoder())
    function = _prepare_4d_attention_mask_for_sdpa
    report = stepscope.accelerate(model)
    assert report.replaced == {"attention mask": ["0"]}
    assert model(tokens(0)) == [None]
    capture()
    assert model(tokens(1)) == [None]
    with pytest.raises(AssertionError, match="reads a tensor"):
        model(tokens(0)[:, :4])
    assert globals()["_prepare_4d_attention_mask_for_sdpa"] is function
    report.undo()
    with pytest.raises(AssertionError, match="reads a tensor"):
        model(tokens(1))


@pytest.mark.parametrize("name", ["attention_mask", "encoder_attention_mask"])
def test_a_mask_of_the_caller_is_not_decided_by_the_calls_before(
    name: str, capture: Callable[[], None]
) -> None:
    """It may have padding in the next batch; so may that of an encoder alone."""
    model = Encoder()
    stepscope.accelerate(model)
    padding = torch.ones(2, LENGTH)
    padding[1, 3:] = 0
    mask = model(tokens(0), **{name: padding})[-1]
    assert mask is not None
    assert torch.equal(mask[1, 0, 0] < 0, padding[1] == 0)
    assert set(model(tokens(0), **{name: torch.ones(2, LENGTH)})) == {None}
    capture()
    with pytest.raises(AssertionError, match="reads a tensor"):
        model(tokens(0), **{name: padding})
