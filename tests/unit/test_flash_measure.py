"""Measuring for the flash study: on a CPU for real, our kernels' launches by stand-ins."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton.runtime.errors import OutOfResources

from sample_records import value_of
from stepscope.attention.tiles import Tile
from stepscope.attention.triton import launch as triton_launch
from stepscope.measure import kernels
from stepscope.measure.device import pick_device
from stepscope.measure.kernels import KernelRun
from stepscope.studies.attention.workload import RESULTS, AttentionStep
from stepscope.studies.base import CaseSkipped, Measurement
from stepscope.studies.flash import STUDY
from stepscope.studies.flash.accuracy import errors
from stepscope.studies.flash.cases import FlashFlags, Shape
from stepscope.studies.flash.measure import launch_facts, measure_tile


class Bench:
    device = pick_device("cpu")

    def __init__(self) -> None:
        self.said: list[str] = []

    def progress(self, done: int, total: int, what: str) -> None:
        assert done <= total
        self.said.append(what)


def measured(**flags: Any) -> Measurement:
    (case,) = STUDY.cases(FlashFlags(min_seconds=0.0, race_seconds=0.0, rounds=3, **flags))
    return STUDY.measure(case, Bench())


def grid(attention: str, **flags: Any) -> Measurement:
    flags = {"dtype": ("float32",), "seq": (64,), "head": (16,), "shape": ()} | flags
    return measured(part=("grid",), attention=(attention,), **flags)


def test_a_cell_holds_three_passes_with_what_they_count() -> None:
    made = grid("sdpa")
    assert [(s.name, s.clock, len(s.values)) for s in made.series] == [
        ("both", "host", 5),
        ("forward", "host", 5),
        ("backward", "host", 5),
    ]
    assert all(len(series.warmup) == 2 for series in made.series)
    forward = 4 * 64 * 64 * 16 / 2
    passes = ("forward", "backward", "")
    counted = [value_of(made.quantities, "flops", phase=phase) for phase in passes]
    assert counted == [forward, 2.5 * forward, 3.5 * forward]
    # A CPU counts no tensors and has no kernels of its own.
    assert "peak_bytes" not in {one.name for one in made.quantities}
    assert made.notes == {}
    assert made.attachments == {"kernels": {}}


def test_errors_are_those_against_float64() -> None:
    step = AttentionStep(Shape.parse("1x2x40x16:float32").workload("sdpa"), Bench.device)
    held = errors(step, Bench.device)
    inputs = [x.detach().double().requires_grad_() for x in (step.q, step.k, step.v)]
    exact = torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=True)
    gradients = torch.autograd.grad(exact, inputs, step.grad.double())
    got = step.results()
    for name, wanted in zip(RESULTS, (exact, *gradients), strict=True):
        distance = (got[name].double() - wanted).abs().max().item()
        error = value_of(held, "error", variant=name)
        assert error == pytest.approx(distance, rel=1e-6, abs=1e-12)
        assert 0 < value_of(held, "last_place", variant=name) <= 1e-6
        assert 0 < value_of(held, "reference_error", variant=name) < 1e-4


def test_a_wrong_result_has_a_large_error(monkeypatch: pytest.MonkeyPatch) -> None:
    step = AttentionStep(Shape.parse("1x1x40x16:float32").workload("sdpa"), Bench.device)
    off = step.results()
    off["dk"] = off["dk"] + 0.5
    monkeypatch.setattr(step, "results", lambda: off)
    held = errors(step, Bench.device)
    assert value_of(held, "error", variant="dk") == pytest.approx(0.5, rel=1e-3)
    assert value_of(held, "error", variant="dq") < 1e-4
    off["dk"][0, 0, 0, 0] = torch.nan
    left = {(one.name, one.variant) for one in errors(step, Bench.device)}
    assert ("error", "dk") not in left
    assert ("error", "dq") in left


def test_the_error_of_the_reference_is_its_own() -> None:
    held = grid("reference").quantities
    for name in RESULTS:
        reference = value_of(held, "reference_error", variant=name)
        assert value_of(held, "error", variant=name) == reference


def test_errors_are_left_out_where_float64_costs_too_much() -> None:
    step = AttentionStep(Shape.parse("1x1x4097x1:float32").workload("sdpa"), Bench.device)
    assert errors(step, Bench.device) == ()


@pytest.fixture
def no_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine where nobody asked for it."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr("stepscope.attention.api._DECIDED", {})


@pytest.mark.usefixtures("no_interpreter")
@pytest.mark.parametrize("name", ["triton", "sdpa_cudnn", "flex"])
def test_an_implementation_that_cannot_is_skipped_with_its_reason(name: str) -> None:
    with pytest.raises(CaseSkipped, match=f"{name}: .*cpu"):
        grid(name, dtype=("bfloat16",), head=(64,))


def test_a_length_for_a_gpu_and_the_tiles_of_one_are_skipped_on_a_cpu() -> None:
    with pytest.raises(CaseSkipped, match="GFLOP a call"):
        grid("sdpa", seq=(65536,))
    for case in STUDY.cases(FlashFlags(part=("tiles",))):
        with pytest.raises(CaseSkipped, match="a GPU kernel"):
            STUDY.measure(case, Bench())


@pytest.mark.usefixtures("no_interpreter")
def test_in_a_race_who_cannot_is_noted_and_the_others_go_on() -> None:
    made = measured(
        part=("race",), race=("1x1x64x16:float32",), racers=("triton", "sdpa", "tiled", "auto")
    )
    assert [(series.name, series.variant) for series in made.series] == [
        (name, racer) for name in ("step", "wall") for racer in ("sdpa", "tiled", "auto")
    ]
    assert all(len(series.values) == 3 for series in made.series)
    assert made.attachments["excluded"]["triton"].startswith("refused: q is on cpu")
    assert made.notes == {"auto": "takes sdpa"}


def test_a_racer_that_fails_is_noted_too(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = AttentionStep.results

    def results(self: AttentionStep) -> dict[str, torch.Tensor]:
        if self.workload.attention == "tiled":
            raise RuntimeError("planted\nmore")
        return honest(self)

    monkeypatch.setattr(AttentionStep, "results", results)
    made = measured(part=("race",), race=("1x2x64x16:float32",), racers=("sdpa", "tiled"))
    assert made.attachments["excluded"] == {"tiled": "failed: RuntimeError: planted"}
    assert [(s.name, s.variant) for s in made.series] == [("step", "sdpa"), ("wall", "sdpa")]
    with pytest.raises(RuntimeError, match="tiled: failed: RuntimeError: planted"):
        measured(part=("race",), race=("1x2x64x16:float32",), racers=("flex", "tiled"))


def test_a_race_of_nobody_is_skipped_with_every_reason() -> None:
    with pytest.raises(CaseSkipped, match=r"triton: refused.*; flex: refused"):
        measured(part=("race",), race=("1x1x64x16",), racers=("triton", "flex"))


def test_racers_share_their_tensors() -> None:
    step = AttentionStep(Shape.parse("1x1x16x8:float32").workload("sdpa"), Bench.device)
    other = step.variant(attention="tiled")
    assert (other.q is step.q, other.grad is step.grad) == (True, True)
    for name, value in step.results().items():
        torch.testing.assert_close(other.results()[name], value)


class Launches:
    """Stands in for the launcher: tiles above a size do not fit, unless the pipeline is short."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, most: int = 4096) -> None:
        self.most = most
        self.forced: dict[str, Tile] = {}
        self.held: list[Any] = []
        self.runs = 0
        monkeypatch.setattr(triton_launch, "forced_tiles", self.forced_tiles, raising=False)
        monkeypatch.setattr(triton_launch, "recorded_launches", self.recorded, raising=False)
        monkeypatch.setattr(kernels, "profile_kernels", self.profile)

    @contextmanager
    def forced_tiles(self, tiles: dict[str, Tile]) -> Iterator[None]:
        self.forced = tiles
        yield
        self.forced = {}

    @contextmanager
    def recorded(self) -> Iterator[list[Any]]:
        self.held = []
        yield self.held

    def run(self) -> None:
        self.runs += 1
        for kind in ("forward", "query"):
            tile = self.forced.get(kind, Tile(64, 64, 4, 2))
            if tile.m * tile.n * tile.stages > self.most:
                raise OutOfResources(tile.stages * 1000, self.most, "shared memory")
            kernel = SimpleNamespace(
                name=f"{kind}_kernel",
                n_regs=100,
                n_spills=tile.m // 64,
                metadata=SimpleNamespace(shared=tile.m * tile.n),
            )
            self.held.append(SimpleNamespace(kind=kind, tile=tile, kernel=kernel))

    def profile(self, run: Any, device: object) -> tuple[KernelRun, ...]:
        del device
        before = self.runs
        run()
        names = ("forward_kernel", "copy", "query_kernel")
        return tuple(KernelRun(n, 2.0) for _ in range(self.runs - before) for n in names)


def test_what_the_compiler_made_of_each_kernel_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = launch_facts(Launches(monkeypatch, most=1 << 20).run)
    assert value_of(facts, "tile_m", variant="forward") == 64
    assert value_of(facts, "stages", variant="forward") == 2
    assert value_of(facts, "registers", variant="query") == 100
    assert value_of(facts, "shared_bytes", variant="query") == 4096


def test_the_interpreter_has_tiles_and_no_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = Launches(monkeypatch)

    def run() -> None:
        launches.held.append(SimpleNamespace(kind="forward", tile=Tile(32, 32, 4, 1), kernel=None))

    assert {(one.variant, one.name) for one in launch_facts(run)} == {
        ("forward", name) for name in ("tile_m", "tile_n", "warps", "stages")
    }


def test_a_tile_is_timed_by_its_own_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = Launches(monkeypatch, most=1 << 20)
    found = measure_tile("query", Tile(128, 16, 4, 2), launches.run, 7, Bench())
    assert not isinstance(found, str)
    times, facts = found
    assert times == (2.0,) * 7
    assert facts["spills"] == (2, "registers")
    assert facts["tile_m"] == (128, "rows")


def test_a_tile_is_tried_with_fewer_stages_before_it_does_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launches = Launches(monkeypatch, most=8192)
    found = measure_tile("forward", Tile(64, 64, 4, 3), launches.run, 2, Bench())
    assert not isinstance(found, str)
    assert found[1]["stages"] == (2, "stages")
    refused = measure_tile("forward", Tile(128, 128, 4, 3), launches.run, 2, Bench())
    assert isinstance(refused, str)
    assert refused.startswith("does not fit: out of resource: shared memory")


def test_a_tile_that_does_not_compile_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    Launches(monkeypatch)

    def run() -> None:
        raise AssertionError("m must be 64\nand more")

    found = measure_tile("forward", Tile(16, 16, 4, 3), run, 2, Bench())
    assert found == "does not compile: AssertionError: m must be 64"


def test_a_kernel_that_nobody_saw_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = Launches(monkeypatch, most=1 << 20)
    assert measure_tile("key_value", Tile(16, 16, 4, 1), launches.run, 2, Bench()) == (
        "was not launched"
    )
    monkeypatch.setattr(kernels, "profile_kernels", lambda run, device: ())  # noqa: ARG005
    found = measure_tile("forward", Tile(16, 16, 4, 1), launches.run, 2, Bench())
    assert found == "the profiler saw no forward_kernel"
