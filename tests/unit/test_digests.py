"""Digests depend on every bit of a tensor and not on its memory layout."""

from __future__ import annotations

import pytest
import torch

from stepscope.parallel import digests as module
from stepscope.parallel.digests import digests

DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.complex64,
    torch.complex128,
    torch.int64,
    torch.bool,
    torch.float8_e4m3fn,
)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_digest_depends_on_values_and_their_order(dtype: torch.dtype) -> None:
    values = torch.randn(6, 5, generator=torch.Generator().manual_seed(1)).to(dtype)
    values[0, 0], values[0, 1] = torch.ones(1).to(dtype)[0], torch.zeros(1).to(dtype)[0]
    other = values.clone()
    other[0, 0], other[0, 1] = values[0, 1].clone(), values[0, 0].clone()
    columns = values.clone().t().contiguous().t()
    first, swapped, strided = digests([values, other, columns])
    assert first == strided
    assert first != swapped


def test_conjugation_and_negation_are_resolved() -> None:
    values = torch.tensor([1 + 2j, 3 - 4j])
    lazy, resolved, plain = digests([values.conj(), values.conj().resolve_conj(), values])
    assert lazy == resolved != plain
    imaginary = values.conj().imag
    assert digests([imaginary]) == digests([imaginary.resolve_neg()])


def test_every_bit_of_a_long_tensor_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHUNK", 16)
    values = torch.arange(50, dtype=torch.float32)
    before = digests([values])
    assert before != digests([values.roll(16)])
    for bit in range(32):
        changed = values.clone()
        changed.view(torch.int32)[37] ^= 1 << bit if bit < 31 else -(1 << 31)
        assert digests([changed]) != before, bit


def test_tensors_without_elements_have_a_digest() -> None:
    assert digests([torch.zeros(0, 3), torch.zeros(())]) == [0, 0]
    assert digests([]) == []
