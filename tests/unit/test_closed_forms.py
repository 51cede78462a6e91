"""Communication against compute in closed form, compared with the formulas by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.analysis.rehearsal.closed_forms import (
    ParallelStrategy,
    largest_tensor,
    parallel_strategies,
)
from stepscope.analysis.rehearsal.cluster import custom_cluster, make_cluster
from stepscope.errors import UsageError
from stepscope.model import cost
from stepscope.model.sizes import find_size, with_overrides

MODEL = with_overrides(find_size("small"), context=512)
RATE = 4e14


def strategies(
    ranks: int = 64, bandwidth_gbs: float = 50.0, latency_us: float = 0.0
) -> dict[str, ParallelStrategy]:
    cluster = custom_cluster(ranks, latency_us, bandwidth_gbs)
    all_strategies = parallel_strategies(
        MODEL, cluster, RATE, gradient_bytes=2, activation_bytes=2, tensor=4
    )
    return {strategy.name.split()[0].rstrip(":"): strategy for strategy in all_strategies}


def test_data_parallelism_needs_tokens_by_the_ratio_of_rate_and_link() -> None:
    flops = cost.flops(MODEL, 1, 512)
    moved_s = 2 * 63 / 64 * 2 * cost.parameters(MODEL).total / 50e9
    by_hand = moved_s / (flops.backward / RATE)
    assert strategies()["data"].bound_below == pytest.approx(by_hand, rel=1e-3)
    # g·F/(2B) tokens, up to the attention's FLOPs and parameters that are not multiplied.
    rule = 2 * RATE / (2 * 50e9) * 63 / 64
    assert by_hand * 512 == pytest.approx(rule, rel=0.15)


def test_fsdp_moves_and_overlaps_with_half_as_much_again() -> None:
    by_name = strategies()
    assert by_name["FSDP"].bound_below == pytest.approx(by_name["data"].bound_below, rel=1e-3)


def test_tensor_parallelism_is_bound_at_every_batch_or_none() -> None:
    strategy = strategies()["tensor"]
    assert strategy.name == "tensor 4"
    flops = cost.flops(MODEL, 1, 512)
    moved_s = 4 * 12 * 2 * 3 / 4 * 2 * 768 * 512 / 50e9
    assert strategy.ratio(1.0) == pytest.approx(moved_s / (flops.step / 4 / RATE), rel=1e-9)
    assert strategy.ratio(100.0) == pytest.approx(strategy.ratio(1.0))
    assert strategy.bound_below is None
    fast = strategies(bandwidth_gbs=50_000.0)["tensor"]
    assert fast.ratio(1.0) < 1
    assert (fast.bound_below or 1.0) < 1e-6


def test_latency_sets_a_batch_for_tensor_parallelism() -> None:
    strategy = strategies(bandwidth_gbs=50_000.0, latency_us=100.0)["tensor"]
    assert strategy.bound_below is not None
    assert strategy.bound_below > 1
    assert strategy.ratio(strategy.bound_below) == pytest.approx(1.0, rel=1e-3)
    assert strategy.ratio(strategy.bound_below / 2) > 1


def test_two_dimensions_add_both_communications() -> None:
    by_name = strategies()
    strategy = next(s for name, s in by_name.items() if name == "2-D")
    assert strategy.unit == "4 ranks"
    inner = custom_cluster(4, 0.0, 50.0).time("all-reduce", 2 * 512 * 768 * 2) * 48
    size = cost.parameters(MODEL).total * 2 / 4
    outer = custom_cluster(16, 0.0, 50.0)
    apart = 2 * outer.time("all-gather", size) + outer.time("reduce-scatter", size)
    assert strategy.communication_ms(2.0) == pytest.approx(inner + apart)


def test_a_tensor_group_divides_ranks_and_heads() -> None:
    assert largest_tensor(MODEL, 64, 8) == 4  # twelve heads
    assert largest_tensor(MODEL, 1024, 1024) == 4
    assert largest_tensor(MODEL, 12, 12) == 12
    assert largest_tensor(MODEL, 7, 8) == 1


@pytest.mark.parametrize(
    ("tensor", "rate", "message"),
    [
        (3, RATE, "64 ranks cannot be divided into groups of 3"),
        (8, RATE, "12 attention heads cannot be divided among 8 ranks"),
        (4, 0.0, "rate is 0 FLOP/s"),
    ],
)
def test_invalid_degrees_are_refused(tensor: int, rate: float, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parallel_strategies(MODEL, make_cluster("infiniband", 64), rate, 4, 2, tensor)


@given(ranks=st.sampled_from([2, 8, 64, 1024]), rate=st.floats(1e9, 1e15))
def test_the_bound_separates_two_regimes(ranks: int, rate: float) -> None:
    cluster = make_cluster("infiniband", ranks)
    for strategy in parallel_strategies(
        MODEL, cluster, rate, 4, 2, largest_tensor(MODEL, ranks, 8)
    ):
        below = strategy.bound_below
        if below is None:
            assert strategy.ratio(1e6) > 1, strategy.name
        elif below > 1e-6:
            assert strategy.ratio(2 * below) < 1 + 1e-6, strategy.name
            assert strategy.ratio(below / 2) > 1 - 1e-6, strategy.name


def test_a_node_with_few_ranks_has_few_ports() -> None:
    """One rank of nine moves all of a message through its own port, twice."""
    full, lonely = (make_cluster("infiniband", ranks) for ranks in (16, 9))
    port = lonely.between.bytes_per_ms
    assert lonely.time("all-reduce", 1e9) >= 1e9 / port
    assert full.time("all-reduce", 1e9) < 1e9 / port
