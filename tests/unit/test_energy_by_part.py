"""Energy of a step by part: GEMM shapes, every part runs, the ledger adds up."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import step_matmuls as listing
import torch
from energy_parts import (
    ATTENTION,
    BASELINE_MATMULS,
    FULL_STEP,
    GEMMS,
    PASSES,
    UPDATES,
    accounts,
    to_whole,
)
from step_matmuls import Matmul, head_chunks, step_matmuls
from step_race.races import RACES, racers
from torch.utils._python_dispatch import TorchDispatchMode

from command_line import python
from step_records import energy_lines
from stepscope.errors import UsageError
from stepscope.kernels.activation_policy import GATES
from stepscope.kernels.loss_chunks import rows_per_chunk
from stepscope.measure.device import CpuDevice
from stepscope.model.config import ModelConfig, precision
from stepscope.model.cost import flops, parameters
from stepscope.model.sizes import SIZES, find_size, with_overrides

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import energy_by_part  # noqa: E402
import step_parts  # noqa: E402
from step_parts import Setting  # noqa: E402

TINY = ModelConfig(d_model=32, d_ff=48, n_layers=2, n_heads=2, vocab=40, context=16)
HERE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""The device on which the AdamW kernel runs, also in the interpreter."""


class TestShapes:
    @pytest.mark.parametrize("fused_projections", [True, False])
    def test_all_gemms_have_the_counted_flops_of_a_step(self, fused_projections: bool) -> None:
        for table in SIZES.values():
            for config in table.values():
                for batch, context in ((4, 512), (3, 2048), (1, 32_768)):
                    listed = step_matmuls(
                        config, batch * context, fused_projections=fused_projections
                    )
                    counted = flops(config, batch, context).step_linear
                    assert sum(one.flops for one in listed) == counted

    def test_every_gemm_of_xl_at_512(self) -> None:
        listed = step_matmuls(find_size("xl"), 2048, fused_projections=True)
        assert listed[:4] == (
            Matmul("q, k, v", "forward", 2048, 4800, 1600, 48),
            Matmul("q, k, v", "towards the input", 2048, 1600, 4800, 48),
            Matmul("q, k, v", "towards the weight", 4800, 1600, 2048, 48),
            Matmul("output", "forward", 2048, 1600, 1600, 48),
        )
        assert [one.name for one in listed[::3]] == [
            "q, k, v",
            "output",
            "gate, up",
            "down",
            "head",
        ]
        assert listed[-1] == Matmul("head", "towards the weight", 10_000, 1600, 2048, 1)
        separate = step_matmuls(find_size("xl"), 2048, fused_projections=False)
        assert [(one.name, one.columns) for one in separate[::3]] == [
            ("q", 1600),
            ("k", 1600),
            ("v", 1600),
            ("output", 1600),
            ("gate", 6400),
            ("up", 6400),
            ("down", 1600),
            ("head", 10_000),
        ]

    def test_the_head_is_chunked_as_the_loss(self) -> None:
        assert head_chunks(find_size("xl"), 2048, fused_projections=True) == (2048,)
        large = find_size("8b", "2026")
        rows = rows_per_chunk(32_000, large.vocab, large.d_model)
        *full, last = head_chunks(large, 32_000, fused_projections=True)
        assert full
        assert set(full) == {rows}
        assert last == 32_000 - len(full) * rows <= rows
        assert head_chunks(large, 32_000, fused_projections=False) == (32_000,)

    def test_updates_include_every_parameter(self) -> None:
        for size in ("small", "xl", "2.7b"):
            config = find_size(size)
            updated = list(step_parts.weights(config))
            assert sum(_elements(one.shape) for one in updated) == parameters(config).total
            copied = sum(_elements(one.shape) for one in updated if one.copied)
            assert copied == parameters(config).multiplied


def _elements(shape: tuple[int, ...]) -> int:
    return shape[0] * (shape[1] if len(shape) > 1 else 1)


class RanMatmuls(TorchDispatchMode):
    """Records the GEMMs that run inside it: rows, columns, depth."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[tuple[int, int, int]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            a, b = [x for x in args if isinstance(x, torch.Tensor)][-2:]
            self.seen[a.shape[0], b.shape[1], a.shape[1]] += 1
        return func(*args, **(kwargs or {}))


class TestParts:
    @pytest.mark.parametrize(
        ("make", "fused_projections"), [(step_parts.gemms, True), (step_parts.peers_gemms, False)]
    )
    def test_the_gemms_that_run_are_those_that_are_counted(
        self,
        make: Callable[[Setting], Callable[[], object]],
        fused_projections: bool,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(listing, "rows_per_chunk", lambda *_: 20)
        assert head_chunks(TINY, 48, fused_projections=True) == (20, 20, 8)
        run = make(Setting(TINY, 3, HERE))
        # On a GPU the first call also queries the capabilities of cuBLAS.
        run()
        with RanMatmuls() as ran:
            run()
        listed: Counter[tuple[int, int, int]] = Counter()
        for one in step_matmuls(TINY, 48, fused_projections=fused_projections):
            listed[one.rows, one.columns, one.depth] += one.instances
        assert ran.seen == listed

    @pytest.mark.parametrize("gradients", [torch.float32, torch.bfloat16])
    def test_block_gradients_have_the_requested_dtype_and_the_head_is_float32(
        self, gradients: torch.dtype
    ) -> None:
        outputs: Any = step_parts.gemms(Setting(TINY, 3, HERE, gradients=gradients))()
        head = next(i for i, x in enumerate(outputs) if x.shape == (40, 32))
        assert outputs[head].dtype == torch.float32
        assert len(outputs) == 2 * 4 + 1 + 2 * 4
        assert {x.dtype for x in outputs[head + 1 :]} == {gradients}
        assert all(x.abs().sum() > 0 for x in outputs)

    def test_updates_move_every_parameter_and_its_copy(self) -> None:
        setting = Setting(TINY, 3, HERE)
        run = step_parts.updates(setting)
        rows = _closed_over(run)["rows"]
        before = [row[0].clone() for row in rows]
        run()
        assert all((row[0] != old).any() for row, old in zip(rows, before, strict=True))
        assert sum(row[4] is not None for row in rows) == 7 * TINY.n_layers + 1

    @pytest.mark.parametrize("part", energy_by_part.PARTS, ids=lambda part: part.name)
    @pytest.mark.parametrize("policy", ["all", GATES])
    def test_every_part_can_be_repeated(self, part: energy_by_part.Part, policy: str) -> None:
        run = energy_by_part.repeated(
            part.make(Setting(TINY, 3, HERE, activation_policy=policy)), CpuDevice()
        )
        run()
        run()

    @pytest.mark.parametrize("policy", ["all", GATES])
    def test_passes_use_our_kernels(self, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """In a dtype that the interpreter computes correctly."""
        from stepscope.kernels.triton import activation as triton_activation
        from stepscope.kernels.triton import norm as triton_norm
        from stepscope.kernels.triton import rope as triton_rotary

        calls: Counter[str] = Counter()
        for module, name in (
            (triton_norm, "forward"),
            (triton_norm, "backward"),
            (triton_norm, "scaled"),
            (triton_rotary, "rotate"),
            (triton_rotary, "gather_back"),
            (triton_activation, "forward"),
            (triton_activation, "backward"),
        ):
            label = f"{module.__name__.rpartition('.')[2]} {name}"
            monkeypatch.setattr(module, name, _counted(getattr(module, name), label, calls))
        step_parts.passes(Setting(TINY, 3, HERE, activation_policy=policy, narrow=torch.float16))()
        layers = TINY.n_layers
        again = {"norm scaled": 2 * layers} if policy == GATES else {}
        assert calls == again | {
            "norm forward": 2 * layers + 1,
            "norm backward": 2 * layers + 1,
            "rope rotate": layers,
            "rope gather_back": layers,
            "activation forward": layers,
            "activation backward": layers,
        }

    def test_shared_tensors_keep_their_values(self) -> None:
        """Otherwise repeating a part would lead to zeros or NaN."""
        for part in energy_by_part.PARTS:
            run = part.make(Setting(TINY, 3, HERE))
            for _ in range(3):
                run()
            for name, value in _closed_over(run).items():
                for tensor in _tensors(value):
                    assert tensor.isfinite().all(), (part.name, name)
                    assert tensor.count_nonzero() > 0.9 * tensor.numel(), (part.name, name)

    def test_without_a_counter_every_line_reports_it(self) -> None:
        """The full step has run once: it is built and warmed up before it is measured."""
        racer = next(one for one in racers("tiny-64") if one.side == "stepscope")
        small = {"n_layers": 1, "vocab": 100}
        racer = racer._replace(workload=msgspec.structs.replace(racer.workload, overrides=small))
        lines = list(energy_by_part.lines_of("tiny-64", racer, CpuDevice()))
        assert {(line["layers"], line["of_layers"]) for line in lines} == {(1, 2)}
        assert lines[0]["flops"] == flops(find_size("tiny"), 2, 64).step_linear - 2 * 3 * 128 * (
            (10_000 - 100) * 128
        )
        assert energy_by_part.summary(lines[0]).endswith(", scaled up from 1 of 2 blocks")
        assert [line["part"] for line in lines] == [
            GEMMS,
            ATTENTION,
            UPDATES,
            PASSES,
            BASELINE_MATMULS,
            FULL_STEP,
        ]
        assert all("counter" in line["lost"] for line in lines)
        (ledger,) = accounts(lines)
        assert (ledger.rows(), ledger.all_parts, ledger.needed) == ([], None, None)
        assert sum("counter" in row for row in energy_by_part.table(ledger)) == 6


def _counted(function: Callable[..., Any], name: str, calls: Counter[str]) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        calls[name] += 1
        return function(*arguments, **named)

    return call


def _closed_over(run: Callable[[], object]) -> dict[str, Any]:
    cells: Any = run.__closure__  # type: ignore[attr-defined]
    names = run.__code__.co_freevars  # type: ignore[attr-defined]
    return dict(zip(names, (cell.cell_contents for cell in cells), strict=True))


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [x for each in value for x in _tensors(each)]
    if isinstance(value, dict):
        return [x for each in value.values() for x in _tensors(each)]
    return _tensors(vars(value)) if isinstance(value, step_parts.Operands) else []


class TestForm:
    def test_ours_is_the_first_candidate_of_the_race(self) -> None:
        for name in energy_by_part.RACES:
            mine = energy_by_part.our_racer(name)
            assert mine in racers(name)
            policy = "saves gates " if name == "2.7b-2048" else ""
            assert (
                mine.name
                == f"stepscope: eager auto fused projections {policy}optimizer-in-backward graph"
            )
            setting = energy_by_part.setting_of(mine.workload, CpuDevice())
            assert setting.gradients == torch.float32
            narrow = energy_by_part.our_racer(name, side=energy_by_part.NARROW_FORMATS)
            assert narrow in racers(name)
            # The parts have a float32 residual stream.
            assert not precision(narrow.workload.dtype).narrow_stream
            setting = energy_by_part.setting_of(narrow.workload, CpuDevice())
            assert setting.gradients == torch.bfloat16
        assert set(energy_by_part.USUAL) <= set(energy_by_part.RACES)
        others = set(RACES) - set(energy_by_part.RACES)
        assert {name for name in others if not RACES[name].fp8} == {"8b-32768", "tiny-64"}

    def test_attention_and_number_of_blocks_can_be_chosen(self) -> None:
        mine = energy_by_part.our_racer("2.7b-2048", "sdpa_cudnn", 8)
        words = "sdpa_cudnn fused projections saves gates optimizer-in-backward graph"
        assert mine.name == f"stepscope: eager {words}"
        setting = energy_by_part.setting_of(mine.workload, CpuDevice())
        assert (setting.config.n_layers, setting.config.d_model) == (8, 2560)
        assert (setting.tokens, setting.activation_policy, setting.attention) == (
            8192,
            GATES,
            "sdpa_cudnn",
        )
        for layers in (0, 33):
            with pytest.raises(UsageError, match="name 1 to 32"):
                energy_by_part.our_racer("2.7b-512", "auto", layers)

    def test_fewer_blocks_are_scaled_up_by_the_work_of_each_part(self) -> None:
        full = with_overrides(find_size("xl"), context=512)
        half = with_overrides(full, n_layers=24)
        parts = (GEMMS, ATTENTION, UPDATES, PASSES, BASELINE_MATMULS, FULL_STEP)
        times = {part: to_whole(part, full, half, 4, 512) for part in parts}
        assert times[ATTENTION] == times[PASSES] == 2
        block, head = 4 * 1600**2 + 3 * 1600 * 6400, 10_000 * 1600
        exact = (48 * block + head) / (24 * block + head)
        assert times[GEMMS] == times[BASELINE_MATMULS] == pytest.approx(exact, rel=1e-12)
        others = 2 * head + 1600
        exact = (48 * (block + 3200) + others) / (24 * (block + 3200) + others)
        assert times[UPDATES] == pytest.approx(exact, rel=1e-12)
        assert times[GEMMS] < times[FULL_STEP] < 2
        assert to_whole(FULL_STEP, full, full, 4, 512) == 1


def test_a_ledger_adds_up() -> None:
    lines = energy_lines()
    (ledger,) = accounts(lines)
    assert ledger.all_parts is not None
    assert (ledger.all_parts.ms, ledger.all_parts.joules) == (64.0, 40.0)
    assert ledger.all_parts.watts == 625
    assert ledger.needed is not None
    assert (ledger.needed.joules, ledger.lasts_ms(ledger.needed.joules)) == (37.5, 75.0)
    assert [row.part for row in ledger.rows()] == [
        GEMMS,
        ATTENTION,
        UPDATES,
        PASSES,
        "sum of the parts",
        FULL_STEP,
        BASELINE_MATMULS,
    ]
    assert [ledger.of_the_step(row.joules) for row in ledger.rows()] == [
        0.5,
        0.0625,
        0.375,
        0.0625,
        1.0,
        1.0,
        0.625,
    ]
    rates = [row.rate for row in ledger.rows()]
    assert rates == [7e14, *[None] * 5, 5.6e14]
    printed = list(energy_by_part.table(ledger))
    assert printed[1].split() == [
        "GEMMs",
        "40.000",
        "20.000",
        "0.250",
        "500",
        "1700",
        "50.0%",
        "700",
    ]
    assert printed[-2] == "The full step takes 0.00 J more than the sum of its parts."
    assert printed[-1] == (
        "With only GEMMs, attention and AdamW the step would take 37.50 J: at least 75.0 ms at"
        " 500 W."
    )


def test_a_missing_part_leaves_no_sum() -> None:
    lines = [
        line | {"lost": "out of memory"} if line["part"] == PASSES else line
        for line in energy_lines()
    ]
    (ledger,) = accounts(lines)
    assert ledger.all_parts is None
    assert ledger.needed is not None
    assert ledger.lost == {PASSES: "out of memory"}


def run_benchmark(*arguments: str) -> subprocess.CompletedProcess[str]:
    return python("benchmarks/energy_by_part.py", *arguments, cwd=ROOT)


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would measure on this machine")
def test_without_a_gpu_it_prints_what_it_needs() -> None:
    done = run_benchmark("xl-512", "--layers", "2")
    assert done.returncode == 1
    assert done.stdout.startswith("needs an NVIDIA GPU")
    assert "Traceback" not in done.stderr


def test_other_races_stay_in_the_file(tmp_path: Path) -> None:
    lines = [{"race": "xl-512", "part": "a"}, {"race": "2.7b-512", "part": "a"}]
    path = tmp_path / "lines.jsonl"
    assert energy_by_part.others(path, ["xl-512"]) == []
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    assert energy_by_part.others(path, ["xl-512"]) == lines[1:]
    assert energy_by_part.others(None, ["xl-512"]) == []
