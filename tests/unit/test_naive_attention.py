"""Detection of naive attention: matmul, softmax, matmul in one module, not a loss or a router."""

from __future__ import annotations

import msgspec
import pytest
import torch
from test_advice_attention import account, measured_step, saved, summary
from torch import nn

from stepscope.advisor.advise.attention_facts import attention_work
from stepscope.analysis.trace.summary import Summary, Use

WIDTH, HEADS, CONTEXT, VOCAB = 32, 2, 16, 64


class LoRA(nn.Module):
    """A LoRA adapter with submodules in parallel to a linear layer, as PEFT adds it."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(WIDTH, WIDTH)
        self.lora_A = nn.Linear(WIDTH, 4, bias=False)
        self.lora_B = nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


class Attention(nn.Module):
    def __init__(self, variant: str) -> None:
        super().__init__()
        self.variant = variant
        self.query, self.key, self.value = LoRA(), LoRA(), LoRA()
        self.out = nn.Linear(WIDTH, WIDTH)
        self.softmax, self.dropout = nn.Softmax(-1), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            part(x).view(batch, length, HEADS, -1).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        if self.variant == "sdpa":
            mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        elif self.variant == "modules":
            mixed = self.dropout(self.softmax(q @ k.transpose(-2, -1))) @ v
        else:
            mixed = torch.softmax(torch.einsum("bhqd,bhkd->bhqk", q, k), -1) @ v
        return self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))


class Experts(nn.Module):
    """A router's softmax and two batched matmuls of the experts in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)
        self.up = nn.Parameter(torch.randn(4, WIDTH, WIDTH) / 8)
        self.down = nn.Parameter(torch.randn(4, WIDTH, WIDTH) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, WIDTH)
        weight = torch.softmax(self.gate(flat), -1)
        each = torch.bmm(torch.relu(torch.bmm(flat.expand(4, -1, -1), self.up)), self.down)
        return (each * weight.t().unsqueeze(-1)).sum(0).view_as(x)


class Causal(nn.Module):
    """A model that returns its loss, as those of Transformers do."""

    def __init__(self, variant: str, experts: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(
            nn.ModuleList((Attention(variant), Experts() if experts else nn.Identity()))
            for _ in range(2)
        )
        self.lm_head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for attention, rest in self.layers:
            x = rest(x + attention(x))
        return nn.functional.cross_entropy(self.lm_head(x).view(-1, VOCAB), tokens.view(-1))


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.base_model = inner

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.base_model(tokens)


def _batch(size: int, device: torch.device) -> torch.Tensor:
    return torch.arange(size * CONTEXT, device=device).view(size, CONTEXT) % VOCAB


def sdpa() -> tuple[nn.Module, object]:
    return Wrapper(Wrapper(Causal("sdpa", experts=False))), _batch


def sdpa_with_experts() -> tuple[nn.Module, object]:
    return Wrapper(Causal("sdpa", experts=True)), _batch


def functional() -> tuple[nn.Module, object]:
    return Wrapper(Causal("functional", experts=True)), _batch


def modules() -> tuple[nn.Module, object]:
    return Wrapper(Causal("modules", experts=False)), _batch


@pytest.mark.parametrize("build", ["sdpa", "sdpa_with_experts"])
def test_losses_and_routers_with_fused_attention_are_not_naive_attention(build: str) -> None:
    assert measured_step(__name__, build).attention == ()


@pytest.mark.parametrize("build", ["functional", "modules"])
def test_naive_attention_is_detected_with_only_its_matmuls(build: str) -> None:
    step = measured_step(__name__, build)
    parts = {work.name: work for work in step.attention}
    assert set(parts) == {"forward", "backward"}
    phases = {work.name: work for work in step.phases}
    for name, part in parts.items():
        assert 0 < part.classes["matmul"] < phases[name].classes["matmul"]
        assert part.classes["softmax"] > 0


def use(
    kernel: str, kind: str, module: str, role: str = "", count: float = 12.0, **more: str
) -> Use:
    return Use(
        kernel=kernel,
        kind=kind,
        phase=more.get("phase", "forward"),
        module=module,
        role=role,
        ms=1.0,
        count=count,
        places=12,
    )


def traced(*uses: Use) -> Summary:
    return msgspec.structs.replace(summary(), on_device=True, uses=uses)


LAYER = "base_model/model/layers.*/self_attn"
NAIVE = (
    use("gemm_qk", "matmul", LAYER),
    use("gemm_pv", "matmul", LAYER),
    use("softmax_warp_forward", "softmax", LAYER),
    use("gemm_linear", "matmul", f"{LAYER}/q_proj", role="forward"),
)
LOSS = (
    # GPU kernels do not show that a softmax belongs to a loss, and split-K reductions have no role.
    use("softmax_warp_forward", "softmax", "base_model/model", count=1.0),
    use("splitKreduce_kernel", "matmul", f"{LAYER}/q_proj", phase="backward"),
)


def test_gpu_kernels() -> None:
    assert attention_work(traced(*LOSS), ()) == ()
    (work,) = attention_work(traced(*NAIVE, *LOSS), ())
    assert work.classes == {"matmul": 2.0, "softmax": 1.0}


@pytest.mark.parametrize(
    "other",
    [
        use("flash_fwd_kernel", "attention", LAYER, role="forward"),
        use("at::native::sbtopk::gatherTopK", "reduction", LAYER),
    ],
)
def test_fused_attention_or_top_k_in_the_module_rules_it_out(other: Use) -> None:
    assert attention_work(traced(*NAIVE, other), ()) == ()


def test_one_matmul_and_a_softmax_are_not_attention() -> None:
    assert attention_work(traced(*NAIVE[1:]), ()) == ()


def test_the_shape_saved_by_a_softmax_distinguishes_a_router() -> None:
    module = "base_model.model.layers.3.self_attn"
    router, scores = (
        saved("softmax", 128, 4, module=module),
        saved("softmax", 8, 16, 16, module=module),
    )
    assert attention_work(traced(*NAIVE), (), account((router,))) == ()
    assert attention_work(traced(*NAIVE), (), account((router, scores)))
