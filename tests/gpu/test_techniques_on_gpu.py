"""The techniques study on a GPU: every variant correct, the fast one faster, the card complete."""

from __future__ import annotations

import pytest
import torch

from quiet_bench import QuietBench
from sample_records import value_of
from stepscope.measure.device import pick_device
from stepscope.studies.base import Measurement
from stepscope.studies.techniques import STUDY
from stepscope.studies.techniques.cases import TechniquesFlags
from stepscope.studies.techniques.catalog import TECHNIQUES


def measured(technique: str) -> Measurement:
    (case,) = STUDY.cases(TechniquesFlags(technique=(technique,)))
    bench = QuietBench(pick_device("cuda"))
    bench.device.release()
    return STUDY.measure(case, bench)


def median(done: Measurement, variant: str) -> float:
    (values,) = (s.values for s in done.series if (s.variant, s.clock) == (variant, "device"))
    return sorted(values)[len(values) // 2]


@pytest.mark.parametrize("technique", TECHNIQUES)
def test_both_variants_are_correct_and_the_fast_one_is_faster(technique: str) -> None:
    done = measured(technique)
    for variant in ("slow", "fast"):
        assert value_of(done.quantities, "error", variant=variant) < 1e-2
    # The gain is at least 1.5 on any GPU; the gain on this one is in the record.
    assert median(done, "slow") > 1.5 * median(done, "fast")


def test_lanes_of_a_warp_wait_for_the_longest_loop() -> None:
    done = measured("divergence")
    slow, fast = (
        value_of(done.quantities, "flops", variant=variant) for variant in ("slow", "fast")
    )
    idle = slow / fast
    gained = median(done, "slow") / median(done, "fast")
    assert gained == pytest.approx(idle, rel=0.35)


def test_sectors_explain_the_time_of_scattered_reads() -> None:
    done = measured("coalescing")
    slow, fast = (
        value_of(done.quantities, "moved", variant=variant) for variant in ("slow", "fast")
    )
    traffic = slow / fast
    assert median(done, "slow") / median(done, "fast") == pytest.approx(traffic, rel=0.35)


def test_the_card_matches_the_device_properties_of_torch() -> None:
    done = measured("card")
    values = {quantity.name: quantity.value for quantity in done.quantities}
    properties = torch.cuda.get_device_properties(0)
    assert values["sms"] == properties.multi_processor_count
    assert values["l2_bytes"] == properties.L2_cache_size
    assert values["threads_per_sm"] == properties.max_threads_per_multi_processor
    assert values["memory_bytes"] == properties.total_memory
    assert values["lanes_per_warp"] == 32
    assert values["registers_per_sm"] >= 32768
    assert values["shared_bytes_per_sm"] >= values["shared_bytes_per_block"] >= 48 << 10
    assert values["clock_hz"] > 5e8
    assert done.attachments["card"]["name"] == properties.name
