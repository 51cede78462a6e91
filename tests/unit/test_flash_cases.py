"""Cases of the flash study: cells of the grid, their order, and cells left out."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from stepscope.errors import UsageError
from stepscope.studies.attention.workload import RULES
from stepscope.studies.flash import STUDY
from stepscope.studies.flash.cases import AttentionRaceCase, FlashFlags, GridCase, Shape
from study_records import flash_record, race_record


def grid(**flags: object) -> tuple[GridCase, ...]:
    return STUDY.cases(FlashFlags(part=("grid",), **flags))  # type: ignore[arg-type, return-value]


def test_the_full_grid() -> None:
    single = [case for case in grid() if case.heads == 1]
    counted = Counter(case.attention for case in single)
    # lengths × head dimensions × dtypes
    assert counted == {
        "triton": 10 * 4 * 2,
        "sdpa_efficient": 10 * 4 * 2,
        "reference": 10 * 4 * 2,
        "sdpa_flash": 10 * 4,
        "sdpa_cudnn": 10 * 4,
        "tiled": 6 * 4 * 2,
        "flex": 10 * 2 * 2,
        "compiled": 8 * 2 * 2,
    }
    many = {Shape.parse(text).sizes for text in FlashFlags().shape}
    assert many >= {"1,16,16384,64", "2,16,16384,128", "4,32,2048,80", "1,16,4096,64"}
    assert all(case.causal and case.mode == "both" for case in single)


def test_compiled_cells_come_last_and_shapes_stay_together() -> None:
    names = [case.attention for case in grid()]
    first = min(names.index(name) for name in ("flex", "compiled"))
    assert set(names[first:]) == {"flex", "compiled"}
    cases = STUDY.cases(FlashFlags())
    kinds = [type(case) for case in cases]
    order = [AttentionRaceCase, GridCase, AttentionRaceCase]
    assert [kind for kind, _ in itertools.groupby(kinds)] == order
    # Short races include host time, so they run before any profiler.
    assert kinds[:9] == [AttentionRaceCase] * 8 + [GridCase]
    assert all(isinstance(case, AttentionRaceCase) and case.is_short for case in cases[:8])
    shapes = [case.key.partition("_b")[2] for case in grid()[:first]]
    assert list(dict.fromkeys(shapes)) == [s for n, s in enumerate(shapes) if s != shapes[n - 1]]


def test_keys_are_unique() -> None:
    cases = STUDY.cases(FlashFlags())
    assert len({case.key for case in cases}) == len(cases)


def test_short_races_time_more_consecutive_calls() -> None:
    races = [
        case
        for case in STUDY.cases(FlashFlags(part=("race",)))
        if isinstance(case, AttentionRaceCase)
    ]
    many = {case.key for case in races if case.back_to_back == 20}
    assert len(races) == 28
    assert len(many) == 8
    assert all("_b1_h1_" in key for key in many)
    assert all(case.back_to_back and case.host_ahead for case in races)
    assert {case.racers for case in races} == {FlashFlags().racers}


@pytest.mark.parametrize("text", ["1x2x3", "1x2x3x4x5", "0x1x1x1", "1,16,64,64", "axbxcxd", ""])
def test_an_invalid_shape_is_rejected(text: str) -> None:
    with pytest.raises(UsageError, match="does not have four sizes"):
        grid(shape=(text,))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"attention": ("sdpa_flash",), "dtype": ("float32",)}, "does not support float32"),
        ({"attention": ("flex",), "head_dim": (32,)}, "flex is compiled for d 64 and 128"),
        ({"attention": ("tiled",), "context": (8192,)}, "tiled stops at length 4096"),
    ],
)
def test_an_empty_grid_is_rejected(flags: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        grid(shape=(), **flags)


def test_invalid_flags_are_rejected() -> None:
    for flags in ({"part": ("race",), "racers": ("flesh",)}, {"attention": ("flesh",)}):
        with pytest.raises(UsageError, match="'flesh' does not exist"):
            STUDY.cases(FlashFlags(**flags))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="dtype"):
        grid(shape=("1x1x16x16:float7",))
    for name, value in (("steps", 0), ("rounds", 0), ("warmup", -1)):
        with pytest.raises(UsageError, match=f"{name} is {value}"):
            FlashFlags(**{name: value})  # type: ignore[arg-type]


def test_cases_are_decoded_from_the_configs_of_records() -> None:
    for case in STUDY.cases(FlashFlags()):
        assert STUDY.decode(case.config) == case
    records = [flash_record(), race_record({"triton": 1.0})]
    grid_case, race = (result.case for result in STUDY.results(records))
    assert isinstance(grid_case, GridCase)
    assert (grid_case.attention, grid_case.sizes) == ("triton", "1,1,4096,64")
    assert isinstance(race, AttentionRaceCase)
    assert (race.racers, race.sizes) == (("triton",), "1,16,16384,64")


def test_keys_and_configs_are_stable() -> None:
    first = {type(case): case for case in reversed(STUDY.cases(FlashFlags()))}
    assert first[GridCase].key == "triton_b1_h1_s128_d16_bfloat16_causal"
    assert first[GridCase].config == {
        "kind": "grid",
        "attention": "triton",
        "batch": 1,
        "heads": 1,
        "seq": 128,
        "head": 16,
        "dtype": "bfloat16",
        "causal": True,
        "mode": "both",
        "warmup": 2,
        "steps": 5,
        "min_seconds": 0.05,
    }
    assert first[AttentionRaceCase].key == "race_b1_h1_s128_d64_bfloat16_causal"
    assert first[AttentionRaceCase].config == {
        "kind": "race",
        "batch": 1,
        "heads": 1,
        "seq": 128,
        "head": 64,
        "dtype": "bfloat16",
        "causal": True,
        "racers": FlashFlags().racers,
        "back_to_back": 20,
        "host_ahead": True,
        "warmup": 2,
        "rounds": 20,
        "min_seconds": 0.5,
    }
    assert {case.needs for case in first.values()} == {("bfloat16",)}


def test_races_with_other_masks_and_rules() -> None:
    flags = FlashFlags(part=("race",))
    races = {case.sizes: case for case in STUDY.cases(flags)}
    full, shared = races["4,16,4096,128 full"], races["4,32,4096,128 full keys=8"]
    assert (full.config["causal"], full.key) == (False, "race_b4_h16_s4096_d128_bfloat16_full")
    assert shared.config["key_heads"] == 8
    packed = races["1,16,16384,64 documents=512"]
    assert packed.key == "race_b1_h16_s16384_d64_bfloat16_causal_documents=512"
    assert {case.config.get("rule", "").partition("=")[0] for case in races.values()} == {
        "",
        *RULES,
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1x4x64x16:windows=3", "is not a rule of attention"),
        ("1x4x64x16:window", "is not a rule of attention"),
        ("1x4x64x16:sinks=2", "is not a rule of attention"),
        ("1x4x64x16:dropout=1.5", "is not a rule of attention"),
        ("1x4x64x16:dropout=0.0", "is not a rule of attention"),
        ("1x4x64x16:keys=3", "do not divide the 4 heads"),
    ],
)
def test_an_invalid_option_of_a_race_is_rejected(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        STUDY.cases(FlashFlags(part=("race",), race=(text,)))
