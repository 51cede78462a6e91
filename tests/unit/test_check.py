"""`stepscope check` for implementations of one process: correct ones pass, planted mistakes are
named."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from graded import SIMPLE, codes, grade, planted
from stepscope.grading.check.kinds import KINDS, kind_of
from stepscope.grading.criteria.accuracy import as_tf32

BREAK = "if is_causal and j > i:"
MASK = "s.masked_fill(keys > rows, -1e6)"
BACKWARD_MASK = "triu(1)"
DQ, DK = "dq, dk = ds @ k, ds.transpose(-2, -1) @ q", "ds = p * (grad @ v.transpose(-2, -1)"
SAVE = "ctx.save_for_backward(q, k, v, out, lse)"
CACHE = ("class FlashAttention(torch", "CACHE = {}\n\n\nclass FlashAttention(torch")


@pytest.fixture(autouse=True)
def _own_modules() -> Iterator[None]:
    """Forget the graded file: each test writes its own of that name."""
    before, path = set(sys.modules), list(sys.path)
    yield
    for name in set(sys.modules) - before:
        if name.startswith("mine") or name == SIMPLE.stem:
            del sys.modules[name]
    sys.path[:] = path


@pytest.mark.parametrize("kind", ["FlashAttention", "rmsnorm"])
def test_a_correct_implementation_has_no_faults(kind: str) -> None:
    for criterion in KINDS[kind].criteria:
        outcome = grade(SIMPLE, kind, criterion.name)
        assert not outcome.faults, criterion.name
        assert not outcome.notes, criterion.name


@pytest.mark.parametrize(
    ("name", "criteria"),
    [
        ("FlashAttentionTorch", ("causal", "lse", "second-call", "ragged")),
        # In Triton's interpreter, which is slow.
        ("FlashAttentionTriton", ("lse",)),
    ],
)
def test_our_attention_has_no_faults(name: str, criteria: tuple[str, ...]) -> None:
    for criterion in criteria:
        outcome = grade("stepscope.attention", name, criterion, "FlashAttention")
        assert not outcome.faults, criterion


def test_our_rms_norm_has_no_faults() -> None:
    for criterion in KINDS["rmsnorm"].criteria:
        assert not grade("stepscope.kernels", "rms_norm", criterion.name, "rmsnorm").faults


PLANTED = {
    "no scale": (
        "full",
        "missing-scale",
        [
            (
                "transpose(-2, -1) * scale\n                if",
                "transpose(-2, -1)\n                if",
            )
        ],
    ),
    "wrong scale": (
        "full",
        "missing-scale",
        [("scale = q.shape[-1] ** -0.5\n        n, m", "scale = 1 / q.shape[-1]\n        n, m")],
    ),
    "mask off by one": (
        "causal",
        "causal-off-by-one",
        [(MASK, "s.masked_fill(keys > rows + 1, -1e6)"), (BREAK, "if is_causal and j > i + 32:")],
    ),
    "own key masked": (
        "causal",
        "causal-off-by-one",
        [(MASK, "s.masked_fill((keys >= rows) & (rows > 0), -1e6)")],
    ),
    "diagonal tile skipped": (
        "causal",
        "causal-tile-edge",
        [(BREAK, "if is_causal and i and j >= i:")],
    ),
    "diagonal tile not masked": (
        "causal",
        "causal-tile-edge",
        [
            (
                "                if is_causal:\n                    rows",
                "                if False:\n                    rows",
            )
        ],
    ),
    "mask ignored": (
        "causal",
        "mask-ignored",
        [
            (BREAK, "if False:"),
            (
                "                if is_causal:\n                    rows",
                "                if False:\n                    rows",
            ),
        ],
    ),
    "last keys ignored": (
        "ragged",
        "last-block-ignored",
        [("for j in range(0, m, block)", "for j in range(0, m - m % block or m, block)")],
    ),
    "not rescaled": ("full", "not-rescaled", [("acc = kept[..., None] * acc", "acc = acc")]),
    "not normalized": ("full", "not-normalized", [("(acc / total[..., None])", "acc")]),
    "lse without the log": (
        "lse",
        "wrong-lse",
        [
            ("= top + total.log()", "= top + total"),
        ],
    ),
    "lse in log 2": (
        "lse",
        "wrong-lse",
        [("= top + total.log()", "= (top + total.log()) / 0.6931471805599453")],
    ),
    "lse not saved": (
        "lse",
        "saved-lse",
        [
            (SAVE, "ctx.save_for_backward(q, k, v, out, lse[..., None])"),
            ("lse = ctx.saved_tensors", "lse = ctx.saved_tensors\n        lse = lse[..., 0]"),
        ],
    ),
    "lse saved twice": (
        "lse",
        "saved-lse",
        [
            (SAVE, "ctx.save_for_backward(q, k, v, out, lse, lse + 0)"),
            ("out, lse = ctx.saved_tensors", "out, lse, _ = ctx.saved_tensors"),
        ],
    ),
    "no delta": ("full", "missing-delta", [(" - delta) * scale", ") * scale")]),
    "gradient not scaled": ("full", "gradient-scale", [(" - delta) * scale", " - delta)")]),
    "gradients swapped": (
        "full",
        "gradients-swapped",
        [("return dq.to(dtype), dk.to(dtype)", "return dk.to(dtype), dq.to(dtype)")],
    ),
    "one gradient wrong": (
        "full",
        "wrong-factor",
        [("dv.to(dtype), None", "2 * dv.to(dtype), None")],
    ),
    "one gradient missing": ("full", "missing-dk", [("dk.to(dtype), dv", "None, dv")]),
    "backward mask off by one": ("causal", "causal-off-by-one", [(BACKWARD_MASK, "triu(2)")]),
    "backward without mask": (
        "causal",
        "mask-ignored",
        [("        if ctx.is_causal:", "        if False:")],
    ),
    "last queries ignored in backward": (
        "ragged",
        "last-block-ignored",
        [
            (
                "        dv = p.transpose",
                "        n = q.shape[-2]\n        p[..., n - n % 32 or n :, :] = 0\n"
                "        dv = p.transpose",
            )
        ],
    ),
    "overflow": (
        "large",
        "nan",
        [
            ("torch.maximum(top, s.amax(-1))", "torch.zeros_like(top)"),
            ("new_full(qi.shape[:-1], -torch.inf)", "new_zeros(qi.shape[:-1])"),
        ],
    ),
    "float32 result": (
        "dtypes",
        "dtype-of-output",
        [("torch.empty_like(q)", "torch.empty_like(q, dtype=torch.float32)")],
    ),
    "accumulated in float16": (
        "dtypes",
        "",
        [
            ("acc = torch.zeros_like(qi)", "acc = torch.zeros_like(q[..., i : i + block, :])"),
            (
                "acc = kept[..., None] * acc + p @",
                "acc = (kept[..., None] * acc + p.round(decimals=2) @",
            ),
            (
                "block, :].float()\n                top",
                "block, :].float()).to(acc.dtype)\n                top",
            ),
        ],
    ),
    "cached by first call": (
        "second-call",
        "stale-result",
        [
            CACHE,
            (
                "        n, m, block = q",
                "        q, k, v = CACHE.setdefault('x', (q, k, v))\n        n, m, block = q",
            ),
        ],
    ),
    "saved tensor overwritten": (
        "second-call",
        "stale-result",
        [
            CACHE,
            (
                "lse = torch.empty(q.shape[:-1], device=q.device)",
                "lse = CACHE.setdefault(q.shape, torch.empty(q.shape[:-1], device=q.device))",
            ),
            (SAVE, "ctx.save_for_backward(q, k, v, out)\n        ctx.lse = lse"),
            (
                "q, k, v, out, lse = ctx.saved_tensors",
                "q, k, v, out = ctx.saved_tensors\n        lse = ctx.lse",
            ),
        ],
    ),
    "attribute error": ("full", "raises", [("dtype, scale = q.dtype", "dtype, scale = q.kind")]),
    "contiguous assumed": (
        "strides",
        "",
        [
            (
                "        scale = q.shape[-1] ** -0.5\n        n, m",
                "        q = q.as_strided(q.shape, (q.shape[-2] * q.shape[-1], q.shape[-1], 1))\n"
                "        scale = q.shape[-1] ** -0.5\n        n, m",
            )
        ],
    ),
}


@pytest.mark.parametrize("mistake", PLANTED)
def test_a_mistake_in_attention_is_named(mistake: str, tmp_path: Path) -> None:
    criterion, code, edits = PLANTED[mistake]
    found = codes(grade(planted(tmp_path, *edits), "FlashAttention", criterion))
    assert found
    if code:
        assert found == {code}


NORMS = {
    "no eps": (
        "small",
        "missing-eps",
        [("mean(-1, keepdim=True) + eps)", "mean(-1, keepdim=True))")],
    ),
    "eps outside the root": (
        "small",
        "missing-eps",
        [
            (
                "keepdim=True) + eps)",
                "keepdim=True)) / (1 + eps * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True)))",
            )
        ],
    ),
    "another eps": ("small", "wrong-eps", [("root = torch", "eps = 1e-6\n    root = torch")]),
    "squares summed": ("values", "sum-not-mean", [("pow(2).mean", "pow(2).sum")]),
    "mean subtracted": (
        "values",
        "mean-subtracted",
        [("wide = x.float()", "wide = x.float() - x.float().mean(-1, keepdim=True)")],
    ),
    "no weight": ("values", "missing-weight", [("wide * root * weight.float()", "wide * root")]),
    "in float16": (
        "dtypes",
        "low-precision",
        [("wide = x.float()", "wide = x"), ("weight.float()", "weight")],
    ),
    "gradient of the root left out": (
        "values",
        "wrong-dx",
        [("(wide * root *", "(wide * root.detach() *")],
    ),
    "stale": (
        "second-call",
        "stale-result",
        [
            ("wide = x.float()", "wide = LAST.setdefault(x.shape, x).float()"),
            ("def rmsnorm", "LAST = {}\n\n\ndef rmsnorm"),
        ],
    ),
}


@pytest.mark.parametrize("mistake", NORMS)
def test_a_mistake_in_rms_norm_is_named(mistake: str, tmp_path: Path) -> None:
    criterion, code, edits = NORMS[mistake]
    assert codes(grade(planted(tmp_path, *edits), "rmsnorm", criterion)) == {code}


def test_an_endless_loop_is_named_with_its_line(tmp_path: Path) -> None:
    file = planted(
        tmp_path, ("    wide = x.float()", "    while True:\n        pass\n    wide = x")
    )
    (fault,) = grade(file, "rmsnorm", "values", seconds=0.5).faults
    assert fault.code == "hangs"
    assert "mine.py" in fault.text


def test_a_refusal_of_ragged_lengths_is_a_note(tmp_path: Path) -> None:
    edit = ("n, m, block =", "assert q.shape[-2] % 32 == 0\n        n, m, block =")
    outcome = grade(planted(tmp_path, edit), "FlashAttention", "ragged")
    assert not outcome.faults
    assert "refuses" in outcome.notes[0]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("FlashAttention", "FlashAttention"),
        ("flash_attn", "FlashAttention"),
        ("MyDDP", "DDP"),
        ("DDPIndividualParameters", "DDP"),
        ("DDPBucketed", "DDPBucketed"),
        ("FullyShardedDataParallel", "FSDP"),
        ("ShardedOptimizer", "ShardedOptimizer"),
        ("OptimizerStateSharding", "ShardedOptimizer"),
        ("RMSNorm", "rmsnorm"),
        ("rms_norm", "rmsnorm"),
        ("Linear", None),
    ],
)
def test_the_kind_follows_from_the_name(name: str, kind: str | None) -> None:
    assert kind_of(name) == kind


def test_values_are_rounded_to_the_mantissa_of_tf32() -> None:
    given = torch.tensor([1.0, -1.0, 1 + 2**-10, 1 + 2**-12, -(1 + 2**-11 + 2**-13), 3e-5])
    rounded = as_tf32(given)
    assert rounded[:5].tolist() == [1.0, -1.0, 1 + 2**-10, 1.0, -(1 + 2**-10)]
    assert 0 < abs(rounded[5] / given[5] - 1) <= 2**-11
