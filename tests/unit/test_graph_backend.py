"""The graph backend: gradients are those of the model as it is, whatever a pass replaced."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from stepscope.acceleration import backend as backend_module
from stepscope.acceleration.backend import GraphReport, Graphs, backend, graph_reports
from stepscope.acceleration.torch_internals import known_symbols, symbols_of
from stepscope.errors import UsageError

VOCAB, WIDTH, HEADS, KEY_HEADS, LAYERS = 48, 32, 4, 2, 2


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Attention(nn.Module):
    """Causal attention with grouped keys, in the spelling that `attend` has."""

    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        size = WIDTH // HEADS
        self.q = nn.Linear(WIDTH, HEADS * size, bias=False)
        self.kv = nn.Linear(WIDTH, 2 * KEY_HEADS * size, bias=False)
        self.o = nn.Linear(HEADS * size, WIDTH, bias=False)
        self.attend = attend

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.q(x).view(batch, length, HEADS, -1).transpose(1, 2)
        k, v = self.kv(x).view(batch, length, 2 * KEY_HEADS, -1).transpose(1, 2).chunk(2, 1)
        group = HEADS // KEY_HEADS
        k, v = (
            y[:, :, None].expand(-1, -1, group, -1, -1).reshape(batch, HEADS, length, -1)
            for y in (k, v)
        )
        out = self.attend(q, k, v)
        return self.o(out.transpose(1, 2).reshape(batch, length, -1))


class Block(nn.Module):
    """Compiled in half the time of one with a norm and an MLP."""

    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.attention = Attention(attend)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x)


class FullBlock(Block):
    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__(attend)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.activation: Callable[[Tensor], Tensor] = functional.gelu

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.down(self.activation(self.up(x)))


class Model(nn.Module):
    """Of one block, where a test does not compare blocks: each takes as long to compile."""

    def __init__(
        self, attend: Callable[..., Tensor], layers: int = 1, block: type[Block] = Block
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(block(attend) for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def logits(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.logits(ids[:, :-1])
        return functional.cross_entropy(logits.float().view(-1, VOCAB), ids[:, 1:].reshape(-1))


def sdpa_flag(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def sdpa_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    at = torch.arange(q.shape[-2])
    return functional.scaled_dot_product_attention(q, k, v, at[None] <= at[:, None])


def naive(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    mask = torch.tril(torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool))
    return torch.softmax(scores.masked_fill(~mask, float("-inf")), -1) @ v


def einsums(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Einsums and a softmax of elementary operators."""
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * q.shape[-1] ** -0.5
    at = torch.arange(q.shape[-2])
    scores = torch.where(at[None] <= at[:, None], scores, -torch.inf)
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    weights = weights / weights.sum(-1, keepdim=True)
    return torch.einsum("bhqk,bhkd->bhqd", weights, v)


def ids_of(length: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB, (2, length), generator=generator)


def compiled(model: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(model, backend=backend, options={"compiler": "aot_eager", **options})


def compared(model: nn.Module, lengths: tuple[int, ...] = (9, 9), **options: Any) -> GraphReport:
    """Train on batches with both, compare losses and gradients, and return the first report."""
    original = copy.deepcopy(model)
    graphs = Graphs(compiler="aot_eager", **options)
    run: Any = torch.compile(model, backend=graphs)
    for seed, length in enumerate(lengths):
        ids = ids_of(length, seed)
        losses = [run(ids), original(ids)]
        for one, loss in zip((model, original), losses, strict=True):
            one.zero_grad()
            loss.backward()
        torch.testing.assert_close(losses[0], losses[1])
        for (name, found), expected in zip(
            model.named_parameters(), original.parameters(), strict=True
        ):
            assert (found.grad is None) == (expected.grad is None), name
            if found.grad is not None:
                torch.testing.assert_close(
                    found.grad, expected.grad, msg=name, atol=1e-5, rtol=1e-4
                )
    return graphs.reports[0]


@pytest.mark.parametrize("attend", [sdpa_mask, naive, einsums])
def test_a_model_of_own_classes_is_replaced_by_its_operators(attend: Any) -> None:
    report = compared(Model(attend, LAYERS))
    assert [x.name for x in report.applied] == ["head and loss", *["attention"] * LAYERS]
    assert all("causal" in x.what for x in report.applied[1:])
    assert not report.left
    assert report.applied[1].line.startswith(__file__)


def test_blocks_are_regions_that_are_compiled_once() -> None:
    report = compared(Model(sdpa_flag, LAYERS, FullBlock))
    assert (report.regions.count, report.regions.compiled) == (LAYERS + 2, 3)


def test_no_module_list_is_needed_and_one_region_is_right() -> None:
    report = compared(nn.Sequential(nn.Embedding(VOCAB, 4), nn.Linear(4, 4), Sum()))
    assert report.regions.count == 1


class Sum(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square().sum()


class Scaled(Model):
    """Each block reads its own element of a shared parameter."""

    def __init__(self) -> None:
        super().__init__(sdpa_flag, 3)
        self.scales = nn.Parameter(torch.linspace(0.5, 1.5, 3))

    def logits(self, ids: Tensor) -> Tensor:
        x = first = self.embedding(ids)
        for number, block in enumerate(self.blocks):
            x = block(self.scales[number] * x + first)
        return self.head(x)


def test_an_element_of_a_shared_parameter_does_not_make_blocks_differ() -> None:
    report = compared(Scaled())
    assert (report.regions.count, report.regions.compiled) == (5, 4)


def soft_capped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.tanh(q @ k.transpose(-2, -1) * 0.3 / 20.0) * 20.0
    at = torch.arange(q.shape[-2])
    visible = (at[None] <= at[:, None]) & (at[None] > at[:, None] - 4)
    return torch.softmax(scores + torch.where(visible, 0.0, -torch.inf), -1) @ v


def test_window_and_soft_cap_run_in_the_kernels() -> None:
    report = compared(Model(soft_capped), (9, 9), kernels=True)
    words = {x.what for x in report.applied if x.name == "attention"}
    assert words == {"naive, causal, window 4, soft cap 20, grouped"}


def test_without_kernels_rules_stay_as_they_are() -> None:
    report = compared(Model(soft_capped), kernels=False)
    assert {x.reason for x in report.left} == {"no kernel for its rules on this device"}


def same_step(run: Any, model: nn.Module, original: nn.Module, ids: Tensor) -> None:
    losses = run(ids), original(ids)
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[0], losses[1])
    for found, expected in zip(model.parameters(), original.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, atol=1e-5, rtol=1e-4)


def test_packed_documents_run_in_the_kernels() -> None:
    class Packed(Model):
        def logits(self, ids: Tensor) -> Tensor:
            number = (ids % 5 == 0).cumsum(-1)
            same = number[:, None, :, None] == number[:, None, None, :]
            at = torch.arange(ids.shape[-1])
            mask = same & (at[None] <= at[:, None])
            x = self.embedding(ids)
            for block in self.blocks:
                block.attention.attend = lambda q, k, v: functional.scaled_dot_product_attention(
                    q, k, v, mask
                )
                x = block(x)
            return self.head(x)

    original, model = Packed(sdpa_flag), Packed(sdpa_flag)
    run = compiled(model, kernels=True)
    ids = ids_of(12)
    same_step(run, model, original, ids)
    assert any("documents" in x.what for x in graph_reports()[-1].applied)


class Padded(Model):
    """Token 0 is padding; its labels are ignored."""

    def forward(self, ids: Tensor) -> Tensor:
        at = torch.arange(ids.shape[-1])
        mask = (at[None] <= at[:, None]) & (ids != 0)[:, None, None, :]
        x = self.embedding(ids)
        for block in self.blocks:
            block.attention.attend = lambda q, k, v: functional.scaled_dot_product_attention(
                q, k, v, mask
            )
            x = block(x)
        labels = functional.pad(ids, (0, 1))[:, 1:].reshape(-1)
        return functional.cross_entropy(self.head(x).view(-1, VOCAB), labels, ignore_index=0)


def test_blocks_share_the_padding_of_a_batch() -> None:
    model, original = Padded(sdpa_flag, LAYERS), Padded(sdpa_flag, LAYERS)
    graphs = Graphs(compiler="aot_eager", kernels=True)
    run: Any = torch.compile(model, backend=graphs)
    ids = ids_of(12).clamp(min=1)
    ids[0, :4], ids[1, -3:] = 0, 0
    same_step(run, model, original, ids)
    (report,) = graphs.reports
    words = ["SDPA, causal, padding, grouped"] * LAYERS
    assert [x.what for x in report.applied if x.name == "attention"] == words
    assert (report.regions.count, report.regions.compiled) == (LAYERS + 2, 3)


class Clamped(Model):
    def __init__(self) -> None:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q.clamp_(-0.05, 0.05)
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

        super().__init__(attend, LAYERS)


def test_clamps_in_place_are_kept() -> None:
    report = compared(Clamped())
    assert report.regions.count == LAYERS + 2


def test_what_changes_later_is_seen() -> None:
    model = Model(sdpa_flag)
    original = copy.deepcopy(model)
    run = compiled(model)
    ids = ids_of(9)
    run(ids)
    for one in (model, original):
        one.head.weight.requires_grad_(False)
    losses = run(ids), original(ids)
    torch.testing.assert_close(losses[0], losses[1])
    losses[0].backward()
    assert model.head.weight.grad is None


class Recording(Model):
    """Keeps a regularizer as an attribute, and counts in a buffer."""

    def __init__(self) -> None:
        super().__init__(sdpa_flag)
        self.register_buffer("count", torch.zeros(()))

    def logits(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        self.count += 1
        for block in self.blocks:
            x = block(x)
        self.extra = x.abs().mean()
        return self.head(x)


def test_side_effects_remain() -> None:
    model = Recording()
    original = copy.deepcopy(model)
    run = compiled(model)
    ids = ids_of(9)
    for _ in range(2):
        run(ids), original(ids)
    torch.testing.assert_close(model.extra, original.extra)
    model.extra.backward()
    original.extra.backward()
    torch.testing.assert_close(model.embedding.weight.grad, original.embedding.weight.grad)
    assert model.count == 2


class Returning(Model):
    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        logits = self.logits(ids[:, :-1])
        return functional.cross_entropy(logits.view(-1, VOCAB), ids[:, 1:].reshape(-1)), logits


def test_logits_that_are_returned_are_tensors() -> None:
    model = Returning(sdpa_flag)
    loss, logits = compiled(model)(ids_of(9))
    assert torch.is_tensor(logits)
    assert logits.shape == (2, 8, VOCAB)
    assert [x.reason for x in graph_reports()[-1].left] == ["its logits are used elsewhere"]
    loss.backward()
    assert model.head.weight.grad is not None


def loss_with(**settings: Any) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda logits, targets: functional.cross_entropy(logits, targets, **settings)


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        (loss_with(reduction="sum"), None),
        (loss_with(ignore_index=3), None),
        (loss_with(label_smoothing=0.1), "labels are smoothed"),
        (loss_with(weight=torch.ones(VOCAB)), "classes have weights"),
        (lambda x, t: functional.cross_entropy(x, t, reduction="none").mean(),
         "losses are not reduced"),
        (lambda x, t: functional.cross_entropy(x[:, :40], t % 40), "logits are cut"),
        (lambda x, t: functional.cross_entropy(20 * torch.tanh(x / 20), t),
         "its logits are computed by aten.mul.Tensor"),
        (lambda x, t: functional.cross_entropy(x.half().float(), t), "logits are rounded"),
        (lambda x, t: functional.cross_entropy(x[2:], t[2:]), None),
        (lambda x, t: functional.cross_entropy(x.unflatten(0, (4, -1))[1:].flatten(0, 1), t[4:]),
         None),
        (lambda x, t: functional.cross_entropy(
            x.unflatten(0, (4, 4)).transpose(0, 1).unsqueeze(0).squeeze(0).flatten(0, 1),
            t.view(4, 4).t().flatten()), None),
        (lambda x, t: functional.cross_entropy(x[:, :16].t(), t % 16), "logits are cut"),
    ],
)  # fmt: skip
def test_losses(loss: Any, reason: str | None) -> None:
    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embedding = nn.Embedding(VOCAB, WIDTH)
            self.head = nn.Linear(WIDTH, VOCAB, bias=False)

        def forward(self, ids: Tensor) -> Tensor:
            targets = ids[:, 1:].reshape(-1)
            logits = self.head(self.embedding(ids[:, :-1])).reshape(-1, VOCAB)
            return loss(logits, targets)

    report = compared(WithLoss())
    assert [x.reason for x in report.left] == ([] if reason is None else [reason])
    assert len(report.applied) == (reason is None)


def transposed(x: Tensor, head: nn.Linear) -> Tensor:
    return x @ head.weight.t()


def by_einsum(x: Tensor, head: nn.Linear) -> Tensor:
    return torch.einsum("b s d, v d -> b s v", x, head.weight)


def by_einsum_of_columns(x: Tensor, head: nn.Linear) -> Tensor:
    return torch.einsum("...d,dv->...v", x, head.weight.t())


@pytest.mark.parametrize("apply", [lambda x, head: head(x), transposed, by_einsum,
                                   by_einsum_of_columns])  # fmt: skip
@pytest.mark.parametrize("frozen", [False, True])
def test_spellings_of_a_head_and_its_bias(apply: Any, frozen: bool) -> None:
    class WithHead(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embedding = nn.Embedding(VOCAB, WIDTH)
            self.head = nn.Linear(WIDTH, VOCAB)
            self.head.bias.requires_grad_(not frozen)

        def forward(self, ids: Tensor) -> Tensor:
            logits = apply(self.embedding(ids), self.head)
            return functional.cross_entropy(logits.flatten(0, 1), ids.flatten()) * 3

    report = compared(WithHead())
    assert [x.name for x in report.applied] == ["head and loss"]


def test_a_matrix_of_as_many_rows_as_columns_may_be_transposed() -> None:
    class Transposed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(WIDTH, VOCAB, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return functional.cross_entropy(self.head(x).t(), torch.arange(VOCAB))

    torch.manual_seed(0)
    model, x = Transposed(), torch.randn(VOCAB, WIDTH)
    loss = compiled(model)(x)
    torch.testing.assert_close(loss, model(x))
    assert [x.reason for x in graph_reports()[-1].left] == [
        "aten.t.default moves the columns of logits"
    ]


def test_autocast_around_the_model() -> None:
    model = Model(naive)
    original = copy.deepcopy(model)
    run = compiled(model)
    ids = ids_of(9)
    with torch.autocast("cpu", torch.bfloat16):
        losses = run(ids), original(ids)
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[0], losses[1], atol=2e-2, rtol=2e-2)
    expected = original.head.weight.grad
    error = (model.head.weight.grad - expected).norm() / expected.norm()
    assert error < 3e-2


def test_an_opaque_mask_and_dropout_stay() -> None:
    class Opaque(Model):
        def __init__(self) -> None:
            def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                mask = self.shown[:, None, : q.shape[-2], : q.shape[-2]]
                return functional.scaled_dot_product_attention(q, k, v, mask)

            super().__init__(attend)
            self.register_buffer("shown", torch.rand(2, 32, 32) > 0.2)

    model = Opaque()
    compiled(model)(ids_of(9))
    reasons = {x.reason for x in graph_reports()[-1].left}
    assert reasons == {"its mask does not follow from positions and padding"}


def _constant_factor(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.no_grad():
        factor = q.abs().mean() + 1.0
    return sdpa_flag(q * factor, k, v)


def _constant_weights(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.no_grad():
        weights = (q @ k.mT).softmax(-1)
    return weights @ v + q


def _constant_copy_of_none(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.no_grad():
        # The same tensors: they keep their gradients.
        factor = q.float().abs().mean() + k.contiguous().abs().mean()
    return sdpa_flag(q, k, v) * factor


@pytest.mark.parametrize("attend", [_constant_factor, _constant_weights, _constant_copy_of_none])
def test_no_grad_inside_of_a_block(attend: Any) -> None:
    compared(Model(attend))


def test_what_cannot_be_traced_again_is_compiled_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("no such operator")

    monkeypatch.setattr(backend_module, "retraced", refuse)
    report = compared(Model(sdpa_flag))
    assert report.failure == "RuntimeError: no such operator"
    assert "no such operator" in str(report)


class Doubled(torch.autograd.Function):
    """Its gradient is not that of its operators."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        del ctx
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        del ctx
        return gradients[0] * 3


@pytest.mark.parametrize(
    ("activation", "operator"),
    [
        # As an attribute, `Doubled.apply` itself ends the graph in torch 2.11.
        (lambda x: Doubled.apply(x), "autograd_function_apply"),
        (
            lambda x: checkpoint(functional.gelu, x, use_reentrant=False),
            "tag_activation_checkpoint",
        ),
    ],
)
def test_operators_on_graphs_keep_their_gradients(activation: Any, operator: str) -> None:
    model = Model(sdpa_flag, block=FullBlock)
    for block in model.blocks:
        block.activation = activation
    assert operator in str(compared(model).failure)


class Ranged(nn.Module):
    """Keeps the largest activation, which the program reads without autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.largest = nn.Buffer(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(self.first(x))
        largest = y.data.max()
        if largest.isnan().sum() == 0:
            self.largest.copy_(largest.reshape(1))
        y.data.mul_(2.0)
        return (y / (1 + self.largest)).sum()


def test_data_without_autograd_is_traced() -> None:
    torch.manual_seed(0)
    model = Ranged()
    original, graphs = copy.deepcopy(model), Graphs(compiler="aot_eager")
    run = torch.compile(model, backend=graphs)
    x = torch.randn(3, WIDTH)
    for seed in range(2):
        x = x + seed
        expected, found = original(x), run(x)
        torch.testing.assert_close(found, expected)
        found.backward()
        expected.backward()
    for one, other in zip(model.parameters(), original.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    torch.testing.assert_close(model.largest, original.largest)
    assert all(report.failure is None for report in graphs.reports)


def test_transforms_are_not_traced_again() -> None:
    model = Model(sdpa_flag, block=FullBlock)
    for block in model.blocks:
        block.activation = torch.vmap(lambda row: row * torch.sigmoid(row.cumsum(0)))
    assert "transform" in str(compared(model).failure)


def test_passes_and_regions_can_be_turned_off() -> None:
    report = compared(Model(sdpa_mask), passes=False, regions=False)
    assert not report.outcomes
    assert report.regions.count == 1


@pytest.mark.parametrize("options", [{"pases": True}, {"compiler": "gcc"}])
def test_unknown_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises((UsageError, torch._dynamo.exc.BackendCompilerFailed)):
        torch.compile(Model(sdpa_flag), backend=backend, options=options)(ids_of(9))


class Pair(nn.Sequential):
    """A block of two linear layers."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


def test_the_backend_has_a_name_and_inductor_compiles_its_regions() -> None:
    model = nn.Sequential(Pair(), Pair())
    original = copy.deepcopy(model)
    run = torch.compile(model, backend="stepscope")
    x = torch.randn(2, 8)
    for y in (run(x), original(x)):
        y.square().sum().backward()
    for found, expected in zip(model.parameters(), original.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, atol=1e-5, rtol=1e-4)


def test_a_region_is_compiled_in_a_context_of_its_own_with_all_its_lengths(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Inductor compiles backward passes later, and looks in the tracing context for what it may
    overwrite; it takes lengths from inputs that are not an expression such as `length - 1`."""
    contexts: list[object] = []
    symbolic: list[bool] = []

    def compile_region(module: Any, inputs: Any) -> Any:
        contexts.append(torch._guards.TracingContext.get())
        used, known = ({x for one in inputs for x in symbols(one)}
                       for symbols in (symbols_of, known_symbols))  # fmt: skip
        symbolic.append(bool(used))
        assert used <= known
        return module.forward

    monkeypatch.setitem(backend_module._COMPILERS, "aot_eager", compile_region)
    model = nn.Sequential(Pair(), Pair(), nn.Linear(8, 8))
    run = torch.compile(
        lambda x: model(x[:, :-1]), backend=backend, options={"compiler": "aot_eager"}, dynamic=True
    )
    x = torch.randn(2, 9, 8)
    torch.testing.assert_close(run(x), model(x[:, :-1]))
    assert graph_reports()[-1].failure is None
    assert any(symbolic)
    assert len(contexts) > 1
    assert len({id(x) for x in contexts}) == len(contexts)
