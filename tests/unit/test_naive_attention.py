"""Detection of naive attention: matmul, softmax, matmul in one module, not a loss or a router."""

from __future__ import annotations

import msgspec
import pytest
import torch
from test_advice_attention import MIB, account, measured_step, saved, summary
from torch import nn

from own_records import attached, inspected_record
from stepscope.advisor.advise.attention_facts import attention_work, score_bytes
from stepscope.analysis.advice.changes import advise
from stepscope.analysis.kernels.names import describe
from stepscope.analysis.trace.summary import Summary, Use
from stepscope.views.memory import Account

WIDTH, HEADS, CONTEXT, VOCAB = 32, 4, 16, 64


def elementary_softmax(x: torch.Tensor, dim: int) -> torch.Tensor:
    e = torch.exp(x - x.max(dim, keepdim=True).values)
    return e / e.sum(dim, keepdim=True)


class ElementarySoftmax(nn.Module):
    def forward(self, scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        scores = scores.masked_fill(~mask, -torch.inf)
        e = (scores - torch.amax(scores, -1, keepdim=True)).exp()
        return e / torch.sum(e, -1, keepdim=True)


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
        self.elementary = ElementarySoftmax()

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
        elif self.variant == "functional":
            mixed = torch.softmax(torch.einsum("bhqd,bhkd->bhqk", q, k), -1) @ v
        else:
            mixed = self._elementary(q, k, v, x.new_ones(length, length, dtype=torch.bool).tril())
        return self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))

    def _elementary(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        if self.variant == "einsum":
            scores = torch.einsum("...qd,...kd->...qk", q, k) / q.shape[-1] ** 0.5
            weights = elementary_softmax(torch.where(mask, scores, -torch.inf), -1)
            return torch.einsum("...qk,...kd->...qd", weights, v)
        scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
        if self.variant == "module":
            return self.elementary(scores, mask) @ v
        return elementary_softmax(scores.masked_fill(~mask, -torch.inf), -1) @ v


class Experts(nn.Module):
    """A router's softmax and two batched matmuls of the experts in one module."""

    def __init__(self, elementary: bool = False) -> None:
        super().__init__()
        self.softmax = elementary_softmax if elementary else torch.softmax
        self.gate = nn.Linear(WIDTH, 4)
        self.up = nn.Parameter(torch.randn(4, WIDTH, WIDTH) / 8)
        self.down = nn.Parameter(torch.randn(4, WIDTH, WIDTH) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, WIDTH)
        weight = self.softmax(self.gate(flat), -1)
        each = torch.bmm(torch.relu(torch.bmm(flat.expand(4, -1, -1), self.up)), self.down)
        return (each * weight.t().unsqueeze(-1)).sum(0).view_as(x)


class Causal(nn.Module):
    """A model that returns its loss, as those of Transformers do."""

    def __init__(self, variant: str, experts: bool, elementary: bool = False) -> None:
        super().__init__()
        self.elementary = elementary
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(
            nn.ModuleList((Attention(variant), Experts(elementary) if experts else nn.Identity()))
            for _ in range(2)
        )
        self.lm_head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for attention, rest in self.layers:
            x = rest(x + attention(x))
        logits = self.lm_head(x)
        if self.elementary:
            chosen = elementary_softmax(logits, -1).gather(-1, tokens.unsqueeze(-1))
            return -chosen.log().mean()
        return nn.functional.cross_entropy(logits.view(-1, VOCAB), tokens.view(-1))


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


def elementary_router_and_loss() -> tuple[nn.Module, object]:
    return Wrapper(Causal("sdpa", experts=True, elementary=True)), _batch


def einsum() -> tuple[nn.Module, object]:
    return Wrapper(Causal("einsum", experts=True, elementary=True)), _batch


def matmul() -> tuple[nn.Module, object]:
    return Wrapper(Causal("matmul", experts=False, elementary=True)), _batch


def module() -> tuple[nn.Module, object]:
    return Wrapper(Causal("module", experts=False, elementary=True)), _batch


@pytest.mark.parametrize("build", ["sdpa", "sdpa_with_experts", "elementary_router_and_loss"])
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


@pytest.mark.parametrize(("build", "saved_scores"), [("einsum", 2), ("matmul", 2), ("module", 3)])
def test_attention_with_an_elementary_softmax_is_detected(build: str, saved_scores: int) -> None:
    step = measured_step(__name__, build)
    parts = {work.name: work for work in step.attention}
    assert set(parts) == {"forward", "backward"}
    phases = {work.name: work for work in step.phases}
    for name, part in parts.items():
        assert 0 < part.classes["matmul"] < phases[name].classes["matmul"]
        assert part.classes["elementwise"] > 0
        assert part.classes["reduction"] > 0
    # Exponentials and probabilities, and the scores if `amax` saves them; 2 samples and layers.
    assert step.score_bytes == saved_scores * 2 * 2 * HEADS * CONTEXT**2 * 4
    assert "fused-attention" in [one.code for one in advise(step)]


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


def kernel(name: str) -> Use:
    described = describe(name)
    return use(described.short, described.kind, LAYER)


REDUCED = "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::{}"
SUM = REDUCED.format(
    "func_wrapper_t<float, at::native::sum_functor<float, float, float>"
    "::operator()(at::TensorIterator&)::{lambda(float, float)#1}>, unsigned int, float, 4, 4> >(…)"
)
ELEMENTARY = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::exp_kernel_cuda("
    "at::TensorIteratorBase&)::{lambda()#2}::operator()() const::{lambda(float)#1}>(int, …)",
    SUM,
    "void at::native::elementwise_kernel<128, 2, at::native::gpu_kernel_impl_nocast<"
    "at::native::BinaryFunctor<float, float, float, at::native::binary_internal::DivFunctor<float>"
    " > >(at::TensorIteratorBase&, …)::{lambda(int)#1}>(int, …)",
)
MAXIMA = [
    REDUCED.format("MaxOps<float>, unsigned int, float, 4, 4> >(…)"),
    REDUCED.format("func_wrapper_t<float, at::native::MaxNanFunctor<float> >, unsigned int> >(…)"),
]


@pytest.mark.parametrize("maximum", MAXIMA)
def test_gpu_kernels_of_an_elementary_softmax(maximum: str) -> None:
    matmuls = [one for one in NAIVE if one.kind == "matmul"]
    softmax = [kernel(name) for name in (maximum, *ELEMENTARY)]
    (work,) = attention_work(traced(*matmuls, *softmax, *LOSS), ())
    assert work.classes == {"matmul": 2.0, "elementwise": 2.0, "reduction": 2.0}
    for missing in softmax:
        rest = [one for one in softmax if one is not missing]
        assert attention_work(traced(*matmuls, *rest), ()) == ()
    assert attention_work(traced(matmuls[0], *softmax), ()) == ()


def test_a_submodule_with_an_exp_is_not_part_of_the_attention() -> None:
    gate = msgspec.structs.replace(kernel(ELEMENTARY[0]), module=f"{LAYER}/gate")
    (work,) = attention_work(traced(*NAIVE, gate, use("bmm_gate", "matmul", gate.module)), ())
    assert work.classes == {"matmul": 2.0, "softmax": 1.0}


def test_exponentials_of_another_size_than_any_matmul_operand_are_no_softmax() -> None:
    uses = [one for one in NAIVE if one.kind == "matmul"]
    step = traced(*uses, *(kernel(name) for name in (MAXIMA[0], *ELEMENTARY)))
    module = "base_model.model.layers.3.self_attn"
    features = saved("exp", 8, 4, 16, 32, module=module)
    values = saved("matmul", 32, 16, 8, module=module)
    probabilities = saved("matmul", 32, 16, 32, module=module)
    assert attention_work(step, (), account((features, values))) == ()
    assert attention_work(step, (), account((features, values, probabilities)))


def test_the_exponentials_of_a_loss_are_not_scores() -> None:
    module = "layers.0.attn"
    scores = (
        saved("exp", 8, 4, 64, 64, module=module),
        saved("einsum", 32, 64, 64, module=module),
        saved("einsum", 32, 64, 16, module=module),
    )
    loss = (saved("exp", 8, 64, 64, module="loss"), saved("gather", 8, 64, 64, module="loss"))
    ledger = account((*scores, *loss))
    assert score_bytes(ledger) == 2 * MIB
    # While the scores are live, the loss is not any more.
    peak = ledger.phases[0]
    lines = {line: size for line, size in peak.lines.items() if "loss" not in line}
    later = msgspec.structs.replace(peak, lines=lines)
    record = attached(inspected_record(), ledger=[later], saved=[*scores, *loss])
    assert score_bytes(Account(record)) == 2 * MIB
