"""Exact numbers of the replay: waits, exposed communication, best bucket."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rehearsal_records import Line, recording
from stepscope.analysis.rehearsal.cluster import (
    INFINIBAND,
    LINKS,
    MAX_NVLINK_RANKS,
    NVLINK,
    START_MS,
    Collective,
    Wire,
    all_reduce_ms,
    custom_cluster,
    make_cluster,
    max_ranks,
    ring_half_ms,
)
from stepscope.analysis.rehearsal.replay import STRATEGIES, Upkeep, replay
from stepscope.analysis.rehearsal.sharded import replay_fsdp, replay_sharded
from stepscope.analysis.rehearsal.sweep import (
    ALL,
    doublings,
    replay_any,
    sweep_buckets,
    sweep_ranks,
    sweep_sizes,
)
from stepscope.errors import UsageError
from stepscope.parallel.buckets import MEGABYTE

SLOW = Line(1.0, MEGABYTE / 10)
"""1 ms per message, 10 ms per MiB."""


def test_naive_sends_every_message_after_the_backward() -> None:
    result = replay(recording([60.0, 40.0, 20.0]), "naive", SLOW)
    assert [(m.start, m.end) for m in result.messages] == [(90, 101), (101, 112), (112, 123)]
    assert (result.step_ms, result.exposed_ms) == (133.0, 33.0)


def test_flat_sends_one_message_after_the_backward() -> None:
    result = replay(recording([60.0, 40.0, 20.0]), "flat", SLOW)
    assert [(m.bytes, m.start, m.end) for m in result.messages] == [(3 * MEGABYTE, 90, 121)]
    assert result.exposed_ms == 31.0


def test_overlap_sends_each_gradient_when_it_is_ready() -> None:
    result = replay(recording([60.0, 40.0, 20.0]), "overlap", SLOW)
    assert [(m.ready, m.start, m.end) for m in result.messages] == [
        (50, 50, 61),
        (70, 70, 81),
        (90, 90, 101),
    ]
    assert result.exposed_ms == 11.0
    assert result.communication_ms == 33.0


def test_messages_queue_on_one_channel() -> None:
    result = replay(recording([30.0, 22.0, 20.0]), "overlap", SLOW)
    assert [(m.ready, m.start, m.end) for m in result.messages] == [
        (50, 50, 61),
        (52, 61, 72),
        (60, 72, 83),
    ]
    assert result.exposed_ms == 0.0


def test_a_channel_may_start_a_message_before_the_last_is_done() -> None:
    result = replay(recording([30.0, 22.0, 20.0]), "overlap", Line(5.0, MEGABYTE / 10, gap_ms=0.0))
    assert [(m.start, m.end) for m in result.messages] == [(50, 65), (60, 75), (70, 85)]
    assert result.communication_ms == 35.0


def test_a_bucket_is_sent_with_its_last_gradient_and_in_order() -> None:
    # The first bucket has the gradients that are ready at 20 and 55; the second follows in order.
    result = replay(recording([50.0, 40.0, 55.0, 20.0]), "bucketed", SLOW, bucket_mb=2.0)
    assert [(m.bytes / MEGABYTE, m.ready) for m in result.messages] == [(2, 85), (2, 85)]
    assert [(m.start, m.end) for m in result.messages] == [(85, 106), (106, 127)]


def test_upkeep_delays_what_comes_after_it() -> None:
    upkeep = Upkeep(pack=1.0, pack_byte=2.0 / MEGABYTE, issue=0.5, agree=4.0)
    result = replay(recording([60.0, 20.0]), "overlap", SLOW, upkeep=upkeep)
    # Each gradient delays by 3 ms of packing and half of a millisecond of sending.
    assert [m.ready for m in result.messages] == [53.5, 97.0]
    assert result.backward_end == 97.0
    assert result.synchronized == 108.0
    late = replay(recording([60.0, 20.0]), "flat", SLOW, upkeep=upkeep)
    # The backward ends at 90; then the exchange, packing of two, sending, 21 ms of transfer.
    assert late.synchronized == 90 + 4 + 6 + 0.5 + 21


def test_the_final_exchange_overlaps_with_reductions() -> None:
    result = replay(recording([60.0, 20.0]), "overlap", SLOW, upkeep=Upkeep(agree=10.0))
    assert result.synchronized == 101.0
    longer = replay(recording([60.0, 20.0]), "overlap", SLOW, upkeep=Upkeep(agree=20.0))
    assert longer.synchronized == 110.0


def test_one_rank_does_not_communicate() -> None:
    subject = recording([60.0, 40.0, 20.0])
    for strategy in STRATEGIES:
        result = replay_any(subject, strategy, make_cluster("ethernet", 1), 25.0)
        assert result.exposed_ms == 0.0, strategy


@given(
    ready=st.lists(st.floats(0.1, 60.0), min_size=1, max_size=8),
    sizes=st.lists(st.floats(0.01, 50.0), min_size=8, max_size=8),
    bucket=st.floats(0.1, 100.0),
    latency=st.floats(0.0, 5.0),
    rate=st.floats(1e3, 1e9),
)
def test_invariants_of_every_replay(
    ready: list[float], sizes: list[float], bucket: float, latency: float, rate: float
) -> None:
    subject, channel = recording(ready, sizes[: len(ready)]), Line(latency, rate)
    steps = {name: replay(subject, name, channel, bucket) for name in STRATEGIES}
    for name, result in steps.items():
        assert result.exposed_ms >= -1e-9, name
        assert sum(m.bytes for m in result.messages) == subject.gradient_bytes
        assert all(m.end >= m.start >= m.ready for m in result.messages)
        # Nothing is faster than the links or the compute.
        assert result.step_ms >= max(subject.compute_ms, result.communication_ms) - 1e-6
    assert steps["overlap"].step_ms <= steps["naive"].step_ms + 1e-6
    assert steps["bucketed"].step_ms <= steps["naive"].step_ms + 1e-6


@pytest.mark.parametrize("strategy", ALL)
@pytest.mark.parametrize("bucket_mb", [0.0, -1.0, math.nan])
def test_an_invalid_bucket_size_is_refused(strategy: str, bucket_mb: float) -> None:
    with pytest.raises(UsageError, match="bucket_mb"):
        replay_any(recording([1.0]), strategy, make_cluster("nvlink", 8), bucket_mb)


def test_an_unknown_strategy_is_refused() -> None:
    with pytest.raises(UsageError, match=r"strategy 'naiv' does not exist.*meant naive"):
        replay(recording([1.0]), "naiv", SLOW)


def test_a_ring_moves_two_shares_of_the_rest_and_a_tree_fewer_hops() -> None:
    wire = Wire(0.01, 1e6)
    assert ring_half_ms(wire, 4, 8e6) == pytest.approx(3 * (0.01 + 2.0))
    assert all_reduce_ms(wire, 4, 8e6) == pytest.approx(2 * 3 * (0.01 + 2.0))
    # A short message among many ranks: up and down the tree in ten hops each.
    assert all_reduce_ms(wire, 1024, 1000.0) == pytest.approx(2 * 10 * 0.01 + 2e-3)
    assert all_reduce_ms(wire, 1, 1e9) == 0.0


def test_nodes_reduce_inside_first() -> None:
    size = 800e6
    subject = make_cluster("infiniband", 64)
    inside = 2 * ring_half_ms(NVLINK, 8, size)
    between = 2 * ring_half_ms(INFINIBAND, 8, size / 8)
    assert subject.time("all-reduce", size) == pytest.approx(START_MS + inside + between)
    assert subject.time("reduce-scatter", size) == pytest.approx(START_MS + (inside + between) / 2)
    # Within a node there is no network.
    assert make_cluster("ethernet", 8).time("all-reduce", size) == pytest.approx(
        START_MS + all_reduce_ms(NVLINK, 8, size)
    )


def test_a_custom_link_has_its_own_numbers() -> None:
    subject = custom_cluster(2, latency_us=100.0, bandwidth_gbs=1.0)
    assert subject.time("all-reduce", 1e6) == pytest.approx(2 * 0.1 + 1.0)
    assert subject.name == "1 GB/s, 100 µs"
    assert "nodes of 4" in custom_cluster(8, 1.0, 1.0, per_node=4).name


@pytest.mark.parametrize(
    ("latency", "bandwidth", "per_node", "ranks", "message"),
    [
        (-1.0, 1.0, 1, 2, "latency_us is -1"),
        (math.nan, 1.0, 1, 2, "latency_us is nan"),
        (1.0, 0.0, 1, 2, "bandwidth_gbs is 0"),
        (1.0, math.inf, 1, 2, "bandwidth_gbs is inf"),
        (1.0, 1.0, 0, 2, "per_node is 0"),
        (1.0, 1.0, 1, 0, "ranks is 0"),
    ],
)
def test_an_invalid_link_is_refused(
    latency: float, bandwidth: float, per_node: int, ranks: int, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        custom_cluster(ranks, latency, bandwidth, per_node)


def test_an_unknown_preset_is_refused() -> None:
    with pytest.raises(UsageError, match=r"link 'infinband' does not exist.*meant infiniband"):
        make_cluster("infinband", 8)
    with pytest.raises(UsageError, match="ranks is 0"):
        make_cluster("nvlink", 0)


def test_an_nvlink_domain_that_does_not_exist_is_refused() -> None:
    assert make_cluster("nvlink", MAX_NVLINK_RANKS).ranks == MAX_NVLINK_RANKS
    with pytest.raises(UsageError, match=r"no NVLink domain has 73 GPUs.*72") as refused:
        make_cluster("nvlink", MAX_NVLINK_RANKS + 1)
    assert "infiniband" in str(refused.value)
    with pytest.raises(UsageError, match=r"per_node is 73: the largest NVLink domain has 72"):
        custom_cluster(146, 1.0, 1.0, per_node=MAX_NVLINK_RANKS + 1)


ranks_of_a_preset = st.sampled_from(list(LINKS)).flatmap(
    lambda link: st.tuples(st.just(link), st.integers(1, int(min(4096, max_ranks(link)))))
)


@given(preset=ranks_of_a_preset, size=st.floats(1.0, 1e12))
def test_a_collective_never_beats_its_slowest_link(preset: tuple[str, int], size: float) -> None:
    link, ranks = preset
    subject = make_cluster(link, ranks)
    reduced, gathered = subject.time("all-reduce", size), subject.time("all-gather", size)
    assert min(reduced, gathered) >= 0
    local = min(ranks, subject.per_node)
    nodes = math.ceil(ranks / local)
    if nodes > 1:
        least = 2 * (nodes - 1) / nodes * size / local / subject.between.bytes_per_ms
        assert reduced >= least * (1 - 1e-9)
        assert gathered >= least / 2 * (1 - 1e-9)


COLLECTIVES: tuple[Collective, ...] = ("all-reduce", "reduce-scatter", "all-gather")


@given(
    ranks=st.integers(1, 4096),
    per_node=st.integers(1, MAX_NVLINK_RANKS),
    size=st.floats(1.0, 1e11),
    latency=st.floats(0.0, 100.0),
    bandwidth=st.floats(0.1, 1000.0),
    factor=st.floats(1.0, 100.0),
)
def test_a_better_link_is_never_slower(
    ranks: int, per_node: int, size: float, latency: float, bandwidth: float, factor: float
) -> None:
    usual, wide, late = (
        custom_cluster(ranks, us, gbs, per_node)
        for us, gbs in (
            (latency, bandwidth),
            (latency, bandwidth * factor),
            (latency * factor, bandwidth),
        )
    )
    for what in COLLECTIVES:
        took = usual.time(what, size) * (1 + 1e-9)
        assert wide.time(what, size) <= took
        assert usual.time(what, size) <= late.time(what, size) * (1 + 1e-9)
        better = usual._replace(inside=Wire(latency / 2e3 / factor, 2e9))
        worse = usual._replace(inside=Wire(latency / 2e3, 2e9 / factor))
        assert better.time(what, size) <= worse.time(what, size) * (1 + 1e-9)


@given(ranks=st.integers(1, MAX_NVLINK_RANKS), size=st.floats(1.0, 1e12))
def test_nvlink_is_never_slower_than_nodes_over_a_network(ranks: int, size: float) -> None:
    for what in COLLECTIVES:
        nvlink, infiniband, ethernet = (make_cluster(one, ranks).time(what, size) for one in LINKS)
        assert nvlink <= infiniband * (1 + 1e-9)
        assert infiniband <= ethernet * (1 + 1e-9)


@settings(max_examples=50)
@given(
    ready=st.lists(st.floats(0.1, 60.0), min_size=1, max_size=8),
    sizes=st.lists(st.floats(0.01, 50.0), min_size=8, max_size=8),
    ranks=st.sampled_from([2, 8, 12, 64, 72, 1024]),
    latency=st.floats(0.0, 5000.0),
    bandwidth=st.floats(0.1, 1000.0),
    factor=st.floats(1.0, 100.0),
)
def test_a_step_over_a_better_link_is_never_longer(
    ready: list[float],
    sizes: list[float],
    ranks: int,
    latency: float,
    bandwidth: float,
    factor: float,
) -> None:
    subject, upkeep = recording(ready, sizes[: len(ready)]), Upkeep(pack_byte=1e-7, issue=0.1)

    def best(strategy: str, us: float, gbs: float) -> float:
        cluster = custom_cluster(ranks, us, gbs, per_node=4)
        sweep = sweep_sizes(subject, strategy, cluster, (1.0, 25.0, 100.0), upkeep)
        return sweep.steps[sweep.best].step_ms

    for strategy in ALL:
        step = best(strategy, latency, bandwidth)
        assert best(strategy, latency, bandwidth * factor) <= step * (1 + 1e-9), strategy
        assert step <= best(strategy, latency * factor, bandwidth) * (1 + 1e-9), strategy


def test_a_sharded_step_gathers_after_its_share_of_the_update() -> None:
    cluster = custom_cluster(2, 0.0, MEGABYTE / 10 / 1e6)
    result = replay_sharded(recording([60.0, 20.0]), cluster, bucket_mb=1.0)
    # Half of 10 ms per MiB each: scattered until 55 and 95; updated in 5; gathered in 10.
    assert [(m.start, m.end) for m in result.messages] == [(50, 55), (90, 95), (100, 110)]
    assert result.step_ms == 110.0
    # A rank computes for 95: it updates half of the parameters.
    assert result.exposed_ms == 15.0


def test_fsdp_gathers_one_ahead_and_scatters_behind() -> None:
    cluster = custom_cluster(2, 0.0, MEGABYTE / 10 / 1e6)
    result = replay_fsdp(recording([60.0, 30.0]), cluster, unit_mb=1.0)
    assert [(m.ready, m.start, m.end) for m in result.messages] == [
        (0, 0, 5),
        (5, 5, 10),  # forward: the first unit, then the second ahead of its use
        (35, 35, 40),
        (40, 40, 45),  # backward: the same, from the end
        (70, 70, 75),
        (100, 100, 105),
    ]
    assert (result.forward_end, result.backward_end, result.synchronized) == (35.0, 100.0, 105.0)
    assert result.step_ms == 110.0


def test_the_best_bucket_is_neither_the_smallest_nor_the_largest() -> None:
    subject = recording([60.0 - index for index in range(40)], [1.0] * 40)
    sweep = sweep_buckets(subject, Line(2.0, MEGABYTE), [1.0, 5.0, 40.0])
    steps = {size: result.step_ms for size, result in sweep.steps.items()}
    assert sweep.best == 5.0
    assert steps[5.0] < min(steps[1.0], steps[40.0])
    assert sweep.as_good == (5.0, 5.0)


def test_among_equal_buckets_the_largest_is_best() -> None:
    sweep = sweep_buckets(recording([60.0, 20.0]), Line(0.0, math.inf), [1.0, 2.0, 4.0])
    assert sweep.best == 4.0
    assert sweep.as_good == (1.0, 4.0)


def test_where_scaling_stops_paying() -> None:
    subject = recording([60.0, 20.0], [100.0, 100.0])
    scaling = sweep_ranks(
        subject, lambda n: custom_cluster(n, 2000.0, 100.0), doublings(64), batch=16
    )
    shares = {ranks: result.exposed_share for ranks, result in scaling.kept.items()}
    assert shares[1] == 0.0
    first = next(ranks for ranks, share in shares.items() if share > 0.2)
    assert scaling.stops_paying(0.2) == first > 2
    assert scaling.stops_paying(0.999) is None
    # A batch of sixteen sequences cannot be shared by more ranks.
    assert list(scaling.divided) == [1, 2, 4, 8, 16]
    assert scaling.divided[scaling.fastest].step_ms == min(
        result.step_ms for result in scaling.divided.values()
    )


def test_doublings_end_at_the_requested_number() -> None:
    assert doublings(1) == (1,)
    assert doublings(12) == (1, 2, 4, 8, 12)
    assert doublings(8) == (1, 2, 4, 8)
