"""The full model: size, causality, dtypes, gradients, and its variants."""

from __future__ import annotations

import copy

import pytest
import torch

from stepscope.attention import attention
from stepscope.attention.api import attention_with
from stepscope.model import SIZES, ModelConfig, TransformerLM, cost, cross_entropy, precision

SHAPE = ModelConfig(d_model=48, d_ff=80, n_layers=2, n_heads=3, vocab=61, context=32)
VARIANTS: tuple[dict[str, bool], ...] = (
    {},
    {"fused": True},
    {"fused": True, "fused_projections": True},
)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def some_tokens(seq: int = 20) -> torch.Tensor:
    return torch.randint(0, SHAPE.vocab, (2, seq))


@pytest.mark.parametrize(
    ("table", "name"), [(table, name) for table in SIZES for name in SIZES[table]]
)
def test_parameter_counts_of_every_size(table: str, name: str) -> None:
    model = TransformerLM(SIZES[table][name], device="meta")
    counted = cost.parameters(SIZES[table][name])
    assert counted.total == sum(p.numel() for p in model.parameters())
    by_part = dict.fromkeys(("embedding", "attention", "feed_forward", "norms", "head"), 0)
    for path, parameter in model.named_parameters():
        part = "norms" if "norm" in path else path.removesuffix(".weight").split(".")
        if isinstance(part, list):
            part = part[2] if part[0] == "blocks" else part[0]
        by_part[part] += parameter.numel()
    assert by_part == {part: getattr(counted, part) for part in by_part}


def test_later_tokens_do_not_affect_earlier_logits() -> None:
    for name in ("reference", "sdpa"):
        model = TransformerLM(SHAPE, attention=attention_with(name), dtype=torch.float64)
        tokens = some_tokens()
        changed = tokens.clone()
        changed[:, 13] = (changed[:, 13] + 1) % SHAPE.vocab
        before, after = model(tokens), model(changed)
        torch.testing.assert_close(before[:, :13], after[:, :13], rtol=0, atol=1e-12)
        assert (before[:, 13:] - after[:, 13:]).abs().amax(dim=-1).min() > 1e-6


def test_order_of_the_past_matters() -> None:
    model = TransformerLM(SHAPE, dtype=torch.float64)
    tokens = some_tokens()
    swapped = tokens.clone()
    swapped[0, :2] = torch.tensor([3, 4])
    tokens[0, :2] = torch.tensor([4, 3])
    assert (model(tokens)[0, -1] - model(swapped)[0, -1]).abs().max() > 1e-6


def test_swapping_the_attention_changes_nothing_else() -> None:
    model = TransformerLM(SHAPE, attention=attention_with("reference"))
    other = TransformerLM(SHAPE, attention=attention_with("sdpa"))
    other.load_state_dict(model.state_dict())
    tokens = some_tokens()
    torch.testing.assert_close(other(tokens), model(tokens), rtol=1e-4, atol=1e-5)


def test_gradients_reach_every_parameter() -> None:
    model = TransformerLM(SHAPE)
    cross_entropy(model(some_tokens()), some_tokens()).backward()
    for path, parameter in model.named_parameters():
        assert parameter.grad is not None, path
        assert parameter.grad.abs().sum() > 0, path
        assert torch.isfinite(parameter.grad).all(), path


def test_names_of_the_parts() -> None:
    model = TransformerLM(SHAPE)
    assert [name for name, _ in model.named_children()] == ["embedding", "blocks", "norm", "head"]
    assert [name for name, _ in model.blocks[0].named_children()] == [
        "attention_norm",
        "attention",
        "feed_forward_norm",
        "feed_forward",
    ]
    assert len(list(model.buffers())) == 2, "one rotary table for all blocks"


@pytest.mark.parametrize(
    "name", ["float32", "bfloat16", "bfloat16-stream", "float16", "bfloat16-pure"]
)
def test_dtypes_under_every_precision(name: str) -> None:
    chosen = precision(name)
    weights, stream, compute = (
        getattr(torch, kind) for kind in (chosen.weights, chosen.stream, chosen.compute)
    )
    model = TransformerLM(SHAPE, dtype=weights, narrow_stream=chosen.narrow_stream)
    seen: dict[str, set[torch.dtype]] = {}
    for path, module in model.named_modules():
        kind = type(module).__name__

        def record(_module: object, inputs: tuple[torch.Tensor, ...], out: torch.Tensor, kind=kind):
            seen.setdefault(f"{kind} in", set()).add(inputs[0].dtype)
            seen.setdefault(f"{kind} out", set()).add(out.dtype)

        if path and kind != "ModuleList":
            module.register_forward_hook(record)
    with torch.autocast("cpu", compute, enabled=chosen.autocast):
        logits = model(some_tokens())
        loss = cross_entropy(logits, some_tokens())
    assert logits.dtype == compute
    assert loss.dtype == torch.float32
    assert seen["Block in"] == seen["Block out"] == {stream}, "the residual stream"
    assert seen["RMSNorm in"] == seen["RMSNorm out"] == {stream}
    assert seen["Linear out"] == seen["RotaryEmbedding out"] == {compute}
    loss.backward()
    assert {p.grad.dtype for p in model.parameters()} == {weights}


def test_a_norm_preserves_a_low_precision_dtype_under_autocast() -> None:
    norm = TransformerLM(SHAPE).norm
    with torch.autocast("cpu", torch.bfloat16):
        assert norm(torch.ones(2, 48, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_loss_is_the_mean_over_tokens_in_float32() -> None:
    logits = torch.randn(2, 5, 7, dtype=torch.bfloat16) * 4
    targets = torch.randint(0, 7, (2, 5))
    picked = logits.double().log_softmax(-1).gather(-1, targets[..., None])
    loss = cross_entropy(logits, targets)
    assert loss.dtype == torch.float32
    assert float(loss) == pytest.approx(float(-picked.mean()), rel=1e-6)


def test_a_sequence_longer_than_the_context_raises() -> None:
    with pytest.raises(ValueError, match="sequence of 33 tokens exceeds the context of 32"):
        TransformerLM(SHAPE)(some_tokens(33))


@pytest.mark.parametrize("shape", [(), (5,), (1, 1, 5)])
@pytest.mark.parametrize("how", VARIANTS, ids=str)
def test_tokens_must_be_a_batch_of_sequences(how: dict[str, bool], shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"they need \(batch, seq\)"):
        TransformerLM(SHAPE, **how)(torch.zeros(shape, dtype=torch.long))


@pytest.mark.parametrize("how", VARIANTS, ids=str)
def test_an_empty_batch_gives_empty_logits_and_zero_gradients(how: dict[str, bool]) -> None:
    model = TransformerLM(SHAPE, **how)
    empty = torch.zeros(0, 4, dtype=torch.long)
    logits = model(empty)
    assert logits.shape == (0, 4, SHAPE.vocab)
    loss = model(empty, empty)
    assert loss.isnan()
    for out in (logits.sum(), loss):
        gradients = torch.autograd.grad(out, list(model.parameters()))
        assert all(not gradient.any() for gradient in gradients)


@pytest.mark.parametrize("how", VARIANTS, ids=str)
def test_autocast_does_not_cast_a_float64_model(how: dict[str, bool]) -> None:
    model = TransformerLM(SHAPE, dtype=torch.float64, **how)
    tokens = some_tokens()
    with torch.autocast("cpu", torch.bfloat16):
        under = model(tokens), model(tokens, tokens)
    torch.testing.assert_close(under, (model(tokens), model(tokens, tokens)))


def test_created_on_meta_then_initialized() -> None:
    model = TransformerLM(SHAPE, device="meta")
    assert model(some_tokens().to("meta")).shape == (2, 20, SHAPE.vocab)
    model.to_empty(device="cpu")
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    expected = TransformerLM(SHAPE)
    model.load_state_dict(expected.state_dict())
    tokens = some_tokens()
    torch.testing.assert_close(model(tokens), expected(tokens))


def test_compiles_into_one_graph() -> None:
    model = TransformerLM(SHAPE, attention=attention)
    compiled = torch.compile(copy.deepcopy(model), fullgraph=True, backend="aot_eager")
    tokens = some_tokens()
    loss, expected = (cross_entropy(m(tokens), tokens) for m in (compiled, model))
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(
        [p.grad for p in compiled.parameters()], [p.grad for p in model.parameters()]
    )
