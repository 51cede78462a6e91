"""The rule by which `auto` prefers the Triton kernels: every input has a kind, under the compiler
too."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from stepscope.attention import hopper, ops, sdpa
from stepscope.attention.preference import FASTEST, HEAD_DIMS, description, kind_of, reason_against
from stepscope.attention.tiles import MAX_HEAD


def test_every_supported_head_dimension_has_a_kind() -> None:
    for head_dim in range(1, MAX_HEAD + 1):
        _, largest, *_ = kind_of(2, head_dim, True, False)
        smaller = [size for size in HEAD_DIMS if size < largest]
        assert max(smaller, default=0) < head_dim <= largest


def test_entries_are_kinds_of_some_input() -> None:
    kinds = {
        kind_of(element_bytes, head_dim, causal, grouped)
        for element_bytes, head_dim, causal, grouped in itertools.product(
            (2, 4), range(1, MAX_HEAD + 1), (True, False), (True, False)
        )
    }
    assert all(set(ranges) <= kinds for ranges in FASTEST.values())
    assert len({description(kind) for kind in kinds}) == len(kinds)


class OnHopper(Tensor):
    """A meta tensor that reports a GPU of compute capability 9."""

    device = torch.device("cuda", 0)  # type: ignore[assignment]


def tensors(heads: int, key_heads: int, length: int, head_dim: int, dtype: torch.dtype):
    return [
        torch.empty((4, n, length, head_dim), device="meta", dtype=dtype).as_subclass(OnHopper)
        for n in (heads, key_heads, key_heads)
    ]


def test_cudnn_is_preferred_where_it_was_faster(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))

    def reason(heads, key_heads, length, head_dim, causal, dtype=torch.bfloat16) -> str | None:
        inputs = tensors(heads, key_heads, length, head_dim, dtype)
        return ops.leaves(*inputs, causal, None, None)

    assert reason(64, 32, 1024, 64, True) is None
    assert reason(32, 32, 2048, 80, True) is None
    assert reason(32, 32, 2048, 96, True) is not None
    assert reason(16, 16, 4096, 64, False, torch.float32) is None
    assert reason(8, 1, 128, 64, False, torch.float32) is None
    assert reason(8, 1, 128, 128, True, torch.float32) is None
    assert reason(8, 1, 128, 128, False, torch.float32) is not None
    assert reason(64, 64, 1024, 128, True) is None
    assert "multiply-adds" in (reason(16, 8, 512, 64, True) or "")
    assert "from 5632 keys on" in (reason(16, 8, 8192, 64, True) or "")
    assert "from 1280 keys on" in (reason(16, 16, 4096, 128, True) or "")
    assert "from 6.9e+10 multiply-adds on" in (reason(16, 16, 8192, 64, True) or "")
    assert reason(2, 2, 8192, 64, True) is None
    assert "others were faster" in (reason(16, 16, 4096, 64, True) or "")
    assert "fewer than 8192 keys" in (reason(16, 16, 4096, 128, False, torch.float32) or "")
    assert "full" in (reason(16, 16, 4096, 80, False) or "")
    assert "grouped" in (reason(32, 8, 2048, 80, True) or "")


def test_kernels_are_preferred_where_gradients_must_repeat(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    for head_dim, causal in itertools.product((64, 80, 128), (True, False)):
        inputs = tensors(16, 16, 4096, head_dim, torch.bfloat16)
        assert ops.leaves(*inputs, causal, None, None) is None
    short = tensors(16, 16, 256, 64, torch.bfloat16)
    assert "multiply-adds" in str(ops.leaves(*short, True, None, None))
    assert ops.leaves(*tensors(16, 16, 4096, 96, torch.bfloat16), True, None, None) is not None


def test_a_token_at_a_time_is_left_to_torch() -> None:
    """Decoding: a launch takes longer than the kernel, and new lengths would compile."""
    for name, ranges in FASTEST.items():
        for kind in ranges:
            heads, keys, head_dim = 16, 4096, kind[1]
            assert reason_against(name, kind, heads * keys * head_dim, keys), (name, kind)


def test_cudnn_backward_is_refused_while_algorithms_must_be_deterministic(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(ops, "refuses", lambda *_: None)
    monkeypatch.setattr(sdpa, "refusal", lambda *_: None)
    inputs = tensors(16, 16, 4096, 128, torch.bfloat16)
    assert hopper.refuses(*inputs, True, None, None) is None
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert "not deterministic" in str(hopper.refuses(*inputs, True, None, None))


def test_on_hopper_its_forward_is_preferred_where_it_was_faster_than_cudnns(monkeypatch) -> None:
    from stepscope.attention.triton import specialized

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(specialized, "_device", lambda _: (9, 132))
    monkeypatch.setattr(ops, "refuses", lambda *_: None)
    monkeypatch.setattr(sdpa, "refusal", lambda *_: None)

    def reasons(heads: int, length: int, head_dim: int, causal: bool) -> list[str | None]:
        inputs = tensors(heads, heads, length, head_dim, torch.bfloat16)
        rest = (causal, None, None)
        return [hopper.refuses(*inputs, *rest), hopper.leaves(*inputs, *rest)]

    assert reasons(16, 4096, 64, False) == reasons(16, 4096, 128, True) == [None, None]
    assert reasons(16, 16384, 64, True) == [None, None]
    assert "fewer than 5632 keys" in str(reasons(64, 4096, 64, True)[1])
    refused, left = reasons(256, 1024, 64, False)
    assert refused is None
    assert "cuDNN's forward is faster" in str(left)
    assert "too few query tiles" in str(reasons(1, 16384, 64, False)[1])
    assert "multiply-adds" in str(reasons(16, 768, 64, False)[1])
    assert reasons(64, 1024, 128, True)[1] is None
    assert "fewer than 896 keys" in str(reasons(128, 768, 128, True)[1])


def test_compiler_traces_the_rule_without_a_graph_break() -> None:
    def left(x: Tensor, causal: bool) -> Tensor:
        kind = kind_of(x.element_size(), x.shape[-1], causal, True)
        reason = reason_against("triton", kind, x.numel() << 30, x.shape[0])
        return x + 1 if reason is None else x + 2

    compiled = torch.compile(left, fullgraph=True, backend="eager", dynamic=True)
    long, short = (torch.zeros(rows, 64, dtype=torch.bfloat16) for rows in (2560, 3))
    assert [compiled(x, True)[0, 0] for x in (long, short)] == [1, 2]
    assert compiled(short, False)[0, 0] == 1
