"""Size tables against the published ones, and lookup and overrides of sizes."""

from __future__ import annotations

from itertools import pairwise

import pytest

from stepscope.errors import UsageError
from stepscope.model import SIZES, ModelConfig, find_size, precision, with_overrides

PUBLISHED = {
    "2025": {
        "small": (768, 3072, 12, 12),
        "medium": (1024, 4096, 24, 16),
        "large": (1280, 5120, 36, 20),
        "xl": (1600, 6400, 48, 25),
        "2.7b": (2560, 10240, 32, 32),
    },
    "2026": {
        "small": (768, 3072, 12, 12),
        "medium": (1024, 4096, 24, 16),
        "large": (1280, 5120, 36, 20),
        "xl": (2560, 10240, 32, 32),
        "10b": (4608, 12288, 50, 36),
        "8b": (4096, 11_008, 34, 32),
    },
}


@pytest.mark.parametrize("table", PUBLISHED)
def test_tables_match_the_published_ones(table: str) -> None:
    shapes = {
        name: (size.d_model, size.d_ff, size.n_layers, size.n_heads)
        for name, size in SIZES[table].items()
    }
    assert shapes == PUBLISHED[table]
    other = {"8b": 151_936}
    for name, size in SIZES[table].items():
        assert size.vocab == other.get(name, 10_000), name


def test_tiny_sizes_grow_about_threefold_in_work() -> None:
    work = [
        size.n_layers * (4 * size.d_model**2 + 3 * size.d_model * size.d_ff)
        + size.vocab * size.d_model
        for size in SIZES["tiny"].values()
    ]
    for smaller, larger in pairwise(work):
        assert 2.5 < larger / smaller < 4.5


def test_find_size() -> None:
    assert find_size("xl").d_model == 1600
    assert find_size("xl", "2026").d_model == 2560
    assert find_size("tiny", "2026") is find_size("tiny") is SIZES["tiny"]["tiny"]


def test_an_unknown_name_lists_the_known_ones_or_the_flag_of_its_table() -> None:
    with pytest.raises(UsageError, match=r"one of: .*small, medium, large, xl, 2\.7b") as error:
        find_size("11b")
    assert "10b" not in str(error.value).split("one of:")[1]
    with pytest.raises(UsageError, match=r"'10b' is not in the table of 2025 .*--table 2026"):
        find_size("10b")
    with pytest.raises(UsageError, match="size table '2024' does not exist"):
        find_size("small", "2024")


def test_overrides_are_validated() -> None:
    size = find_size("small")
    longer = with_overrides(size, context=2048, n_layers=2)
    assert (longer.context, longer.n_layers, longer.d_model) == (2048, 2, 768)
    assert size.context == 512
    with pytest.raises(UsageError, match="perhaps you meant n_layers"):
        with_overrides(size, n_layer=2)
    with pytest.raises(UsageError, match="n_layers is 0"):
        with_overrides(size, n_layers=0)


def test_impossible_shapes_raise() -> None:
    with pytest.raises(UsageError, match="does not divide"):
        ModelConfig(d_model=64, d_ff=64, n_layers=1, n_heads=5)
    with pytest.raises(UsageError, match="must be even"):
        ModelConfig(d_model=15, d_ff=64, n_layers=1, n_heads=5)


def test_precision_names() -> None:
    assert precision("bf16") is precision("bfloat16")
    assert precision("fp32").compute == "float32"
    with pytest.raises(UsageError, match="perhaps you meant float32"):
        precision("float3")
