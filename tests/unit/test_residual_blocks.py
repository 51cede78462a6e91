"""Residual adds and norms of an accelerated model as one operation, within blocks, from block to
block and up to the last norm; and what must not be fused."""

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
from nano_gpt import NanoGPT
from stepscope.acceleration.pieces import norm

VOCAB = 50
ALONE, WITH_ADD = False, True
Use = Callable[[Any], object]


@pytest.fixture
def kernels() -> None:
    """Run the kernels in Triton's interpreter."""


@pytest.fixture(autouse=True)
def _without_kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "kernels" not in request.fixturenames:
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.fixture
def norms(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each norm that is computed includes the add before it."""
    seen: list[bool] = []
    originals = norm.normed_sum, norm.sum_before_norm

    def normed_sum(x: Tensor, branch: Tensor | None, *args: Any, **options: Any) -> Any:
        if options["computed"] is None:
            seen.append(branch is not None)
        return originals[0](x, branch, *args, **options)

    def sum_before_norm(*args: Any, **options: Any) -> Any:
        seen.append(WITH_ADD)
        return originals[1](*args, **options)

    monkeypatch.setattr(norm, "normed_sum", normed_sum)
    monkeypatch.setattr(norm, "sum_before_norm", sum_before_norm)
    return seen


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(VOCAB, (2, 2, 6), generator=torch.Generator().manual_seed(seed))
    return tokens[0], tokens[1]


def model(kind: type[NanoGPT] = NanoGPT) -> Any:
    torch.manual_seed(0)
    return kind(VOCAB, 16, layers=2)


def gradients(one: Any, seed: int = 0) -> dict[str, Tensor]:
    one.zero_grad()
    loss = one(*batch(seed))[1]
    loss.backward()
    found = {name: p.grad for name, p in one.named_parameters() if p.grad is not None}
    return found | {"loss": loss.detach()}


def assert_same(plain: Any, fused: Any, calls: int = 3) -> None:
    for seed in range(calls):
        expected, actual = gradients(plain, seed), gradients(fused, seed)
        assert actual.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(actual[name], value, rtol=1e-4, atol=1e-6, msg=name)


def both(use: Use = lambda _: None, kind: type[NanoGPT] = NanoGPT) -> tuple[Any, Any]:
    """Return a plain and an accelerated model, both after `use`, and compare them."""
    plain, fused = model(kind), model(kind)
    stepscope.accelerate(fused, sample=batch())
    for one in (plain, fused):
        use(one)
    assert_same(plain, fused)
    return plain, fused


def test_every_add_is_fused_with_the_norm_that_reads_it(norms: list[bool]) -> None:
    _, fused = both()
    norms.clear()
    gradients(fused)
    assert norms == [ALONE, WITH_ADD, WITH_ADD, WITH_ADD, WITH_ADD]


def test_the_second_call_of_a_model_is_fused_and_undo_ends_it(norms: list[bool]) -> None:
    plain, fused = model(), model()
    report = stepscope.accelerate(fused, sample=batch())
    norms.clear()
    gradients(fused)
    assert norms.count(WITH_ADD) == 4
    report.undo()
    norms.clear()
    assert_same(plain, fused)
    assert norms == []


class Changed(NanoGPT):
    """Writes to the stream between its blocks, in place."""

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Any:
        x = self.transformer["wte"](tokens)
        for block in self.transformer["h"]:  # type: ignore[union-attr]
            x = block(x)
            x[:, 0] = 0
        logits = self.lm_head(self.transformer["ln_f"](x))
        return logits, functional.cross_entropy(logits.flatten(0, 1), targets.flatten())  # type: ignore[union-attr]


def test_a_stream_that_is_changed_in_place(norms: list[bool]) -> None:
    _, fused = both(kind=Changed)
    norms.clear()
    gradients(fused)
    assert norms == [ALONE, WITH_ADD] * 2 + [ALONE]


def blocks(one: Any) -> Any:
    return one.transformer["h"]


def replace_output(one: Any) -> None:
    blocks(one)[0].register_forward_hook(lambda _, __, out: out * 2)


def scale_weight(one: Any) -> None:
    """A hook that writes to the weight of a norm after the block before has run."""

    def write(block: Any, _: Any) -> None:
        with torch.no_grad():
            block.ln_1.weight.mul_(1.5)

    blocks(one)[1].register_forward_pre_hook(write)


def hook_norms(one: Any) -> None:
    for part in (blocks(one)[1].ln_1, one.transformer["ln_f"]):
        part.register_forward_hook(lambda _, __, out: out * 3)


def checkpoint_second(one: Any, reentrant: bool = False) -> None:
    block = blocks(one)[1]
    forward = block.forward
    block.forward = lambda x: checkpoint(forward, x, use_reentrant=reentrant)


def freeze(one: Any) -> None:
    blocks(one)[1].ln_1.requires_grad_(False)
    one.transformer["wte"].requires_grad_(False)


def swap(one: Any) -> None:
    one.transformer["h"] = nn.ModuleList(reversed(list(blocks(one))))


def share(one: Any) -> None:
    one.transformer["h"] = nn.ModuleList([blocks(one)[0]] * 3)


@pytest.mark.parametrize(
    "use",
    [
        replace_output,
        scale_weight,
        hook_norms,
        checkpoint_second,
        lambda one: checkpoint_second(one, reentrant=True),
        freeze,
        swap,
        share,
        lambda one: one.eval(),
    ],
    ids=[
        "output replaced", "weight written", "hooks", "checkpoint", "reentrant checkpoint",
        "frozen", "other order", "shared block", "evaluation",
    ],
)  # fmt: skip
def test_use_that_changes_after_the_model_was_fused(use: Use) -> None:
    """From the third call on, when the adds are fused with the norms after them."""
    plain, fused = both()
    for one in (plain, fused):
        use(one)
    assert_same(plain, fused)


@pytest.mark.usefixtures("kernels")
def test_writes_between_an_add_and_its_norm_with_kernels(norms: list[bool]) -> None:
    """A norm that was computed early and is not read does not fail in the backward pass."""
    plain, fused = model(), model()
    others = ("head and loss", "embedding", "linear", "MLP")
    stepscope.accelerate(fused, sample=batch(), exclude=others)
    assert_same(plain, fused, 1)
    norms.clear()
    assert_same(plain, fused, 1)
    assert norms == [ALONE, WITH_ADD, WITH_ADD, WITH_ADD, WITH_ADD]
    for one in (plain, fused):
        scale_weight(one)
    assert_same(plain, fused, 1)


def test_a_norm_that_nobody_reads_is_not_computed_again(norms: list[bool]) -> None:
    """After a change of the order, every add is fused with its new reader."""
    _, fused = both(swap)
    norms.clear()
    gradients(fused)
    assert norms == [ALONE, WITH_ADD, WITH_ADD, WITH_ADD, WITH_ADD]


def test_a_copy_is_independent() -> None:
    plain, fused = both()
    clone = copy.deepcopy(fused)
    assert_same(plain, clone)
    assert_same(plain, fused)


def test_no_activation_is_kept() -> None:
    """A forward pass that ends early leaves at most the norm that its last block computed."""
    _, fused = both()
    x = torch.randn(1, 4, 16, requires_grad=True)
    blocks(fused)[0](x).sum().backward()
    assert x.grad is not None
    assert_same(model(), fused)


class Scaled(nn.Module):
    """Layer scale."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((16,), 0.3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class DropPath(nn.Module):
    """Stochastic depth."""

    def forward(self, x: Tensor) -> Tensor:
        keep = x.new_empty(x.shape[0], 1, 1).bernoulli_(0.5)
        return x * keep / 0.5 if self.training else x


class VisionBlock(nn.Module):
    """A block with the names of timm's, layer scale and stochastic depth."""

    def __init__(self) -> None:
        super().__init__()
        source = NanoGPT(VOCAB, 16, layers=1).transformer["h"][0]  # type: ignore[index]
        self.norm1, self.norm2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.attn, self.mlp = source.attn, source.mlp
        self.ls1, self.ls2 = Scaled(), Scaled()
        self.drop_path1, self.drop_path2 = DropPath(), DropPath()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_path1(self.ls1(self.attn(self.norm1(x))))
        out: Tensor = x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))
        return out


def test_layer_scale_and_stochastic_depth(norms: list[bool]) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*(VisionBlock() for _ in range(3)), nn.LayerNorm(16))
    fused = copy.deepcopy(plain)
    x = torch.randn(4, 5, 16)
    report = stepscope.accelerate(fused, sample=x)
    assert len(report.replaced["residual block"]) == 3
    for step in range(3):
        results = []
        for one in (plain, fused):
            norms.clear()
            one.zero_grad()
            torch.manual_seed(step)
            out = one(x)
            out.square().mean().backward()
            results.append([out.detach(), *(p.grad for p in one.parameters())])
        torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-6)
    assert norms == [ALONE] + [WITH_ADD] * 6


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_gradients_of_the_streams_between_blocks(dtype: torch.dtype, norms: list[bool]) -> None:
    """They include those of the norms that were computed with the adds, also if the branch has
    another dtype than the stream."""
    torch.manual_seed(0)
    plain = nn.Sequential(*(VisionBlock() for _ in range(2)), nn.LayerNorm(16))
    fused = copy.deepcopy(plain)
    stepscope.accelerate(fused, exclude=("attention", "MLP", "linear"))
    x, tolerance = torch.randn(2, 5, 16), 1e-4 if dtype == torch.float32 else 2e-2
    for step in range(3):
        results = []
        for one in (plain, fused):
            norms.clear()
            torch.manual_seed(step)
            streams = [x.clone().requires_grad_()]
            with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
                for part in one:
                    streams.append(part(streams[-1]))
            loss = streams[-1].float().pow(3).mean() + streams[1].float().pow(3).mean()
            results.append(torch.autograd.grad(loss, streams[:-1]))
        torch.testing.assert_close(results[1], results[0], rtol=tolerance, atol=tolerance / 10)
    assert norms == [ALONE] + [WITH_ADD] * 4


class Batches(VisionBlock):
    """A block that also takes a list of batches of different lengths."""

    def forward(self, x: Any) -> Any:
        return [self(one) for one in x] if isinstance(x, list) else super().forward(x)


def test_a_block_that_is_given_no_tensor_runs_as_it_was() -> None:
    torch.manual_seed(0)
    one = nn.Sequential(Batches()).eval()
    x = [torch.randn(2, 5, 16), torch.randn(2, 3, 16)]
    expected = one(x)
    report = stepscope.accelerate(one, sample=x[0])
    torch.testing.assert_close(one(x), expected, rtol=1e-4, atol=1e-6)
    assert len(report.replaced["residual block"]) == 1


def test_a_block_with_other_parts_is_left() -> None:
    one = model()
    blocks(one)[0].extra = nn.Linear(16, 16)
    report = stepscope.accelerate(one)
    reasons = [left.reason for left in report.left if left.piece == "residual block"]
    assert reasons == ["it has other parts: extra"]
    assert report.replaced["residual block"] == ["transformer.h.1"]


@pytest.mark.parametrize(
    "built",
    [
        model,
        lambda: nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True),
        lambda: nn.TransformerEncoderLayer(
            16, 2, 32, dropout=0.0, batch_first=True, norm_first=True
        ),
    ],
    ids=["nanoGPT", "post-norm", "pre-norm"],
)
def test_a_layer_that_is_exchanged_later_is_used(built: Callable[[], Any]) -> None:
    plain = built()
    fused = copy.deepcopy(plain)
    assert stepscope.accelerate(fused).replaced
    x = torch.randn(2, 6, 16)

    def output(one: Any) -> Tensor:
        result = one(*batch())[1] if isinstance(one, NanoGPT) else one(x)
        return result.sum()  # type: ignore[no-any-return]

    for _ in range(2):
        output(fused).backward()
    layers = [
        name
        for name, layer in plain.named_modules()
        if not list(layer.children()) and list(layer.parameters())
    ]
    assert any("norm" in name or "ln" in name for name in layers)
    for name in layers:
        other = copy.deepcopy(plain.get_submodule(name))
        for parameter in other.parameters():
            nn.init.normal_(parameter)
        path, _, attribute = name.rpartition(".")
        for one in (plain, fused):
            setattr(one.get_submodule(path), attribute, other)
        torch.testing.assert_close(output(fused), output(plain), rtol=1e-4, atol=1e-5, msg=name)
