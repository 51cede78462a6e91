"""Workloads of attention alone, shared by several studies, and the step that runs one.

Importing this module does not import torch; `AttentionStep` does.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Literal

import msgspec

from stepscope.attention import cost
from stepscope.attention.cost import AttentionShape
from stepscope.attention.registry import AUTO, implementation
from stepscope.errors import UsageError
from stepscope.model.config import PRECISIONS, precision
from stepscope.records.schema import Quantity
from stepscope.studies.base import Case
from stepscope.training.flag_checks import check_at_least
from stepscope.training.host_memory import refuse_beyond_host_memory
from stepscope.training.subject import Subject

if TYPE_CHECKING:
    import torch

    from stepscope.attention import ScoreRules
    from stepscope.attention.registry import AttentionFunction
    from stepscope.measure.device import Device
    from stepscope.measure.timer import Phase

AttentionMode = Literal["forward", "backward", "both"]
MODES: tuple[AttentionMode, ...] = ("forward", "backward", "both")
RESULTS = ("output", "dq", "dk", "dv")
_ELEMENT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


RULES: dict[str, float | None] = {
    "window": 1024,
    "documents": 512,
    "prefix": 1024,
    "softcap": 50,
    "alibi": None,
    "sinks": None,
    "dropout": 0.1,
}
"""Rules that a race can have, with an example of the number that follows `=`."""


def check_rule(text: str) -> str:
    """Return `window=1024`, `sinks` and the like unchanged, or raise UsageError."""
    name, _, number = text.partition("=")
    example = RULES.get(name)
    if example is None:
        valid = not number
    elif isinstance(example, int):
        valid = number.isdecimal() and int(number) > 0
    else:
        whole, _, digits = number.partition(".")
        valid = whole == "0" and digits.isdecimal() and int(digits) > 0
    if name not in RULES or not valid:
        known = ", ".join(n if of is None else f"{n}={of}" for n, of in RULES.items())
        raise UsageError(f"{text!r} is not a rule of attention", f"one of: {known}")
    return text


def score_rules(text: str, heads: int, seq: int, device: torch.device) -> ScoreRules:
    """Create the rule that `check_rule` accepted; documents have random lengths around a mean."""
    import torch

    from stepscope.attention import ScoreRules

    name, _, number = text.partition("=")
    if name == "window":
        return ScoreRules(window=int(number))
    if name == "prefix":
        return ScoreRules(prefix=int(number))
    if name == "softcap":
        return ScoreRules(softcap=float(number))
    if name == "dropout":
        return ScoreRules(dropout=float(number))
    if name == "sinks":
        return ScoreRules(sinks=torch.zeros(heads, device=device))
    if name == "alibi":
        steps = torch.arange(1, heads + 1, device=device) / heads
        return ScoreRules(alibi_slopes=2.0 ** (-8.0 * steps))
    generator = torch.Generator().manual_seed(0)
    count = max(1, seq // int(number))
    inner = torch.randperm(seq - 1, generator=generator)[: count - 1].sort().values + 1
    bounds = torch.cat((torch.tensor([0]), inner, torch.tensor([seq])))
    return ScoreRules(cu_seqlens=bounds.to(device))


class AttentionInputs(Case, frozen=True, kw_only=True):
    """Input tensors of shape (batch, heads, seq, head) in one dtype."""

    batch: int
    heads: int
    seq: int
    head: int
    dtype: str

    @property
    def needs(self) -> tuple[str, ...]:
        return (precision(self.dtype).compute,)

    @property
    def sizes(self) -> str:
        return f"{self.batch},{self.heads},{self.seq},{self.head}"

    @property
    def is_single(self) -> bool:
        """True if there is one head of one sequence."""
        return self.batch * self.heads == 1


class AttentionWorkload(AttentionInputs, frozen=True, kw_only=True):
    """One attention call: implementation, inputs, mask and passes."""

    attention: str
    causal: bool
    mode: AttentionMode

    def __post_init__(self) -> None:
        for name in ("batch", "heads", "seq", "head"):
            check_at_least(1, **{name: getattr(self, name)})
        implementation(self.attention)
        if precision(self.dtype).name not in _ELEMENT_BYTES:
            known = ", ".join(name for name in PRECISIONS if name in _ELEMENT_BYTES)
            raise UsageError(f"dtype {self.dtype!r} is not a tensor dtype", f"one of: {known}")

    @property
    def key(self) -> str:
        shape = f"b{self.batch}_h{self.heads}_s{self.seq}_d{self.head}"
        mask = "causal" if self.causal else "full"
        return f"{self.attention}_{shape}_{self.dtype}_{mask}_{self.mode}"

    @property
    def shape(self) -> AttentionShape:
        return AttentionShape(
            batch=self.batch, heads=self.heads, seq_q=self.seq, seq_k=self.seq, d_head=self.head
        )

    @property
    def element_bytes(self) -> int:
        return _ELEMENT_BYTES[self.dtype]

    def flops(self) -> int:
        """FLOPs by the usual convention: a causal mask halves them, backward is 2.5 × forward."""
        forward = cost.forward_flops(self.shape, causal=self.causal)
        backward = cost.kernel_backward_flops(self.shape, causal=self.causal)
        return {"forward": forward, "backward": backward, "both": forward + backward}[self.mode]

    def predicted_saved_bytes(self) -> int:
        """Bytes that a forward pass saves for backward, including the output.

        The inputs exist before. Flash attention saves its output and one number per row.
        """
        saved = cost.output_bytes(self.shape, self.element_bytes)
        if implementation(self.attention).saves_scores:
            saved += cost.probability_bytes(self.shape, self.element_bytes)
            return saved + cost.mask_bytes(self.shape, causal=self.causal)
        return saved + cost.log_sum_exp_bytes(self.shape)

    def quantities(self) -> tuple[Quantity, ...]:
        return (
            Quantity(name="flops", value=self.flops(), unit="FLOP"),
            Quantity(name="tokens", value=self.batch * self.seq, unit="tokens"),
            Quantity(name="predicted_saved_bytes", value=self.predicted_saved_bytes(), unit="B"),
        )


class AttentionStep(Subject):
    """Inputs on the device and the call as phases for a timer.

    `key_heads` is the number of heads of k and v, and `rule` a rule (see `check_rule`).
    """

    def __init__(
        self, workload: AttentionWorkload, device: Device, *, key_heads: int = 0, rule: str = ""
    ) -> None:
        import torch

        self._check_host_memory(workload, device)
        self.workload = workload
        self._device = device
        torch.manual_seed(0)
        torch.set_float32_matmul_precision("highest")
        dtype = getattr(torch, workload.dtype)

        def draw(heads: int) -> torch.Tensor:
            shape = (workload.batch, heads, workload.seq, workload.head)
            return torch.randn(shape, device=device.torch_device, dtype=dtype)

        heads = workload.heads
        of_keys = key_heads or heads
        self.q, self.k, self.v = (draw(n).requires_grad_() for n in (heads, of_keys, of_keys))
        # A random output gradient: that of a sum would be an expanded scalar, unlike in training.
        self.grad = draw(heads)
        self.rules: ScoreRules | None = None
        if rule:
            self.rules = score_rules(rule, heads, workload.seq, device.torch_device)
        self._function = _attention(workload.attention)
        self._out: torch.Tensor | None = None
        self._gradients: tuple[torch.Tensor, ...] = ()

    def variant(self, **changes: str) -> AttentionStep:
        """The same call with another `mode` or `attention`, on the same tensors."""
        other = copy.copy(self)
        other.workload = msgspec.structs.replace(self.workload, **changes)
        other._function = _attention(other.workload.attention)
        other._out, other._gradients = None, ()
        return other

    def refusal(self) -> str | None:
        """Return why the implementation does not support these tensors, or None."""
        from stepscope.attention.call import AttentionCall

        name = self.workload.attention
        if name == AUTO:
            return None
        call = AttentionCall(self.q, self.k, self.v, self.workload.causal, rules=self.rules)
        return implementation(name).load().refuses(call)

    def flops(self) -> int:
        """FLOPs of the workload, those of visible pairs if a rule hides some."""
        if self.rules is None or not self.rules.hides_keys:
            return self.workload.flops()
        from stepscope.attention.visibility import visible_pairs

        work = self.workload
        pairs = visible_pairs(self.rules, self.q, self.k, is_causal=work.causal)
        forward = cost.pair_flops(pairs, heads=work.heads, d_head=work.head)
        backward = 5 * forward // 2
        return {"forward": forward, "backward": backward, "both": forward + backward}[work.mode]

    def results(self) -> dict[str, torch.Tensor]:
        """Output and gradients of one forward and backward pass."""
        self._forward()
        self._backward()
        assert self._out is not None
        tensors = (self._out.detach(), *self._gradients)
        self._out, self._gradients = None, ()
        return dict(zip(RESULTS, tensors, strict=True))

    @staticmethod
    def _check_host_memory(workload: AttentionWorkload, device: Device) -> None:
        """Skip a case that does not fit in CPU memory: a GPU raises, but a CPU starts to swap."""
        inputs = cost.input_bytes(workload.shape, workload.element_bytes)
        needed = inputs + workload.predicted_saved_bytes()
        if implementation(workload.attention).saves_scores:
            # Scores and probabilities exist at once during the softmax.
            needed += cost.probability_bytes(workload.shape, workload.element_bytes)
        refuse_beyond_host_memory(needed, device)

    def phases(self) -> tuple[Phase, ...]:
        from stepscope.measure.timer import Phase

        forward, backward = Phase("forward", self._forward), Phase("backward", self._backward)
        return {"forward": (forward,), "backward": (backward,), "both": (forward, backward)}[
            self.workload.mode
        ]

    def reset(self) -> None:
        """Drop the last results, outside any sample; a backward pass needs a forward pass first."""
        self._out, self._gradients = None, ()
        if self.workload.mode == "backward":
            self._forward()

    def saved_bytes(self) -> int | None:
        """Bytes that a forward pass saves for backward; None if the device does not count them."""
        # The first call also allocates the cuBLAS workspace.
        self._forward()
        self._out, self._gradients = None, ()
        before = self._device.allocated_bytes()
        self._forward()
        self._device.synchronize()
        after = self._device.allocated_bytes()
        self._out = None
        return None if before is None or after is None else after - before

    def _forward(self) -> None:
        causal = self.workload.causal
        self._out = self._function(self.q, self.k, self.v, is_causal=causal, rules=self.rules)

    def _backward(self) -> None:
        import torch

        assert self._out is not None
        self._gradients = torch.autograd.grad(self._out, (self.q, self.k, self.v), self.grad)


def _attention(impl: str) -> AttentionFunction:
    from stepscope.attention.api import attention_with

    return attention_with(impl)
