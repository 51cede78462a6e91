"""Where the joules of a step go: shapes of its products, its parts run once, the account."""

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
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from quiet_bench import QuietBench
from step_records import energy_lines
from stepscope.analysis import matmuls as listing
from stepscope.analysis.energy_parts import (
    ATTENTION,
    PASSES,
    PEERS_PRODUCTS,
    PRODUCTS,
    UPDATES,
    WHOLE,
    accounts,
    to_whole,
)
from stepscope.analysis.matmuls import Matmul, head_chunks, step_products
from stepscope.errors import UsageError
from stepscope.kernels.activation_policy import GATES
from stepscope.kernels.loss_chunks import rows_per_chunk
from stepscope.model.config import ModelConfig, precision
from stepscope.model.cost import flops, parameters
from stepscope.model.sizes import SIZES, find_size, with_overrides
from stepscope.studies.step.races import RACES, racers

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import energy_by_part  # noqa: E402
import parts_of_a_step  # noqa: E402
from parts_of_a_step import Setting  # noqa: E402

TINY = ModelConfig(d_model=32, d_ff=48, n_layers=2, n_heads=2, vocab=40, context=16)
HERE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""Where the kernel of AdamW runs, in the interpreter too."""


class TestShapes:
    @pytest.mark.parametrize("joined", [True, False])
    def test_all_products_have_the_flops_that_a_step_is_counted_with(self, joined: bool) -> None:
        for table in SIZES.values():
            for config in table.values():
                for batch, context in ((4, 512), (3, 2048), (1, 32_768)):
                    listed = step_products(config, batch * context, joined=joined)
                    counted = flops(config, batch, context).step_linear
                    assert sum(one.flops for one in listed) == counted

    def test_xl_at_512_one_by_one(self) -> None:
        listed = step_products(find_size("xl"), 2048, joined=True)
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
        apart = step_products(find_size("xl"), 2048, joined=False)
        assert [(one.name, one.columns) for one in apart[::3]] == [
            ("q", 1600), ("k", 1600), ("v", 1600), ("output", 1600), ("gate", 6400), ("up", 6400),
            ("down", 1600), ("head", 10_000),
        ]  # fmt: skip

    def test_the_head_goes_by_chunks_where_the_loss_does(self) -> None:
        assert head_chunks(find_size("xl"), 2048, joined=True) == (2048,)
        large = find_size("8b", "2026")
        rows = rows_per_chunk(32_000, large.vocab, large.d_model)
        *full, last = head_chunks(large, 32_000, joined=True)
        assert full
        assert set(full) == {rows}
        assert last == 32_000 - len(full) * rows <= rows
        assert head_chunks(large, 32_000, joined=False) == (32_000,)

    def test_updates_are_of_every_parameter(self) -> None:
        for size in ("small", "xl", "2.7b"):
            config = find_size(size)
            held = list(parts_of_a_step.weights(config))
            assert sum(_elements(one.shape) for one in held) == parameters(config).total
            copied = sum(_elements(one.shape) for one in held if one.copied)
            assert copied == parameters(config).multiplied


def _elements(shape: tuple[int, ...]) -> int:
    return shape[0] * (shape[1] if len(shape) > 1 else 1)


class Products(TorchDispatchMode):
    """The matrix products that run within it: rows, columns, depth."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[tuple[int, int, int]] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # fmt: skip
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            a, b = [x for x in args if isinstance(x, torch.Tensor)][-2:]
            self.seen[a.shape[0], b.shape[1], a.shape[1]] += 1
        return func(*args, **(kwargs or {}))


class TestParts:
    @pytest.mark.parametrize(
        ("make", "joined"),
        [(parts_of_a_step.products, True), (parts_of_a_step.peers_products, False)],
    )
    def test_the_products_that_run_are_those_that_are_counted(
        self, make: Callable[[Setting], Callable[[], object]], joined: bool,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:  # fmt: skip
        monkeypatch.setattr(listing, "rows_per_chunk", lambda *_: 20)
        assert head_chunks(TINY, 48, joined=True) == (20, 20, 8)
        run = make(Setting(TINY, 3, HERE))
        # On a GPU the first call also asks what cuBLAS can do.
        run()
        with Products() as products:
            run()
        listed: Counter[tuple[int, int, int]] = Counter()
        for one in step_products(TINY, 48, joined=joined):
            listed[one.rows, one.columns, one.depth] += one.instances
        assert products.seen == listed

    @pytest.mark.parametrize("gradients", [torch.float32, torch.bfloat16])
    def test_gradients_of_blocks_have_the_asked_format_and_that_of_the_head_is_wide(
        self, gradients: torch.dtype
    ) -> None:
        kept: Any = parts_of_a_step.products(Setting(TINY, 3, HERE, gradients=gradients))()
        head = next(i for i, x in enumerate(kept) if x.shape == (40, 32))
        assert kept[head].dtype == torch.float32
        assert len(kept) == 2 * 4 + 1 + 2 * 4
        assert {x.dtype for x in kept[head + 1 :]} == {gradients}
        assert all(x.abs().sum() > 0 for x in kept)

    def test_updates_move_every_parameter_and_its_copy(self) -> None:
        setting = Setting(TINY, 3, HERE)
        run = parts_of_a_step.updates(setting)
        rows = _closed_over(run)["rows"]
        before = [row[0].clone() for row in rows]
        run()
        assert all((row[0] != old).any() for row, old in zip(rows, before, strict=True))
        assert sum(row[4] is not None for row in rows) == 7 * TINY.n_layers + 1

    @pytest.mark.parametrize("part", energy_by_part.PARTS, ids=lambda part: part.name)
    @pytest.mark.parametrize("keep", ["all", GATES])
    def test_every_part_runs_again_and_again(self, part: energy_by_part.Part, keep: str) -> None:
        run = energy_by_part.repeated(
            part.make(Setting(TINY, 3, HERE, keep=keep)), QuietBench.device
        )
        run()
        run()

    @pytest.mark.parametrize("keep", ["all", GATES])
    def test_passes_run_by_our_kernels(self, keep: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """In a format that the interpreter computes rightly."""
        from stepscope.kernels.triton import norm as triton_norm
        from stepscope.kernels.triton import rope as triton_rotary
        from stepscope.kernels.triton import swiglu as triton_swiglu

        calls: Counter[str] = Counter()
        for module, name in (
            (triton_norm, "forward"), (triton_norm, "backward"), (triton_norm, "scaled"),
            (triton_rotary, "turn"), (triton_rotary, "gather_back"),
            (triton_swiglu, "forward"), (triton_swiglu, "backward"),
        ):  # fmt: skip
            label = f"{module.__name__.rpartition('_')[2]} {name}"
            monkeypatch.setattr(module, name, _counted(getattr(module, name), label, calls))
        parts_of_a_step.passes(Setting(TINY, 3, HERE, keep=keep, narrow=torch.float16))()
        layers = TINY.n_layers
        again = {"norm scaled": 2 * layers} if keep == GATES else {}
        assert calls == again | {
            "norm forward": 2 * layers + 1, "norm backward": 2 * layers + 1,
            "rotary turn": layers, "rotary gather_back": layers,
            "swiglu forward": layers, "swiglu backward": layers,
        }  # fmt: skip

    def test_what_all_blocks_share_keeps_its_values(self) -> None:
        """Else a part would come to zeros or NaN while it is repeated."""
        for part in energy_by_part.PARTS:
            run = part.make(Setting(TINY, 3, HERE))
            for _ in range(3):
                run()
            for name, held in _closed_over(run).items():
                for tensor in _tensors(held):
                    assert tensor.isfinite().all(), (part.name, name)
                    assert tensor.count_nonzero() > 0.9 * tensor.numel(), (part.name, name)

    def test_without_a_counter_every_line_says_so(self) -> None:
        """The whole step has run once then: it is built and warmed up before it is measured."""
        racer = next(one for one in racers("tiny-64") if one.side == "ours")
        small = {"n_layers": 1, "vocab": 100}
        racer = racer._replace(workload=msgspec.structs.replace(racer.workload, overrides=small))
        lines = list(energy_by_part.lines_of("tiny-64", racer, QuietBench.device))
        assert {(line["layers"], line["of_layers"]) for line in lines} == {(1, 2)}
        assert lines[0]["flops"] == flops(find_size("tiny"), 2, 64).step_linear - 2 * 3 * 128 * (
            (10_000 - 100) * 128
        )
        assert energy_by_part.told(lines[0]).endswith(", scaled up from 1 of 2 blocks")
        assert [line["part"] for line in lines] == [
            PRODUCTS, ATTENTION, UPDATES, PASSES, PEERS_PRODUCTS, WHOLE,
        ]  # fmt: skip
        assert all("counter" in line["lost"] for line in lines)
        (account,) = accounts(lines)
        assert (account.rows(), account.all_parts, account.needed) == ([], None, None)
        assert sum("counter" in row for row in energy_by_part.table(account)) == 6


def _counted(function: Callable[..., Any], name: str, calls: Counter[str]) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        calls[name] += 1
        return function(*arguments, **named)

    return call


def _closed_over(run: Callable[[], object]) -> dict[str, Any]:
    cells: Any = run.__closure__  # type: ignore[attr-defined]
    names = run.__code__.co_freevars  # type: ignore[attr-defined]
    return dict(zip(names, (cell.cell_contents for cell in cells), strict=True))


def _tensors(held: Any) -> list[torch.Tensor]:
    if isinstance(held, torch.Tensor):
        return [held]
    if isinstance(held, list | tuple):
        return [x for each in held for x in _tensors(each)]
    if isinstance(held, dict):
        return [x for each in held.values() for x in _tensors(each)]
    return _tensors(vars(held)) if isinstance(held, parts_of_a_step.Products) else []


class TestForm:
    def test_ours_is_the_first_that_races(self) -> None:
        for name in energy_by_part.RACES:
            mine = energy_by_part.our_racer(name)
            assert mine in racers(name)
            kept = "keeps gates " if name == "2.7b-2048" else ""
            assert mine.name == f"ours: eager auto joined {kept}updates in backward graph"
            setting = energy_by_part.setting_of(mine.workload, QuietBench.device)
            assert setting.gradients == torch.float32
            narrow = energy_by_part.our_racer(name, side=energy_by_part.NARROW_FORMATS)
            assert narrow in racers(name)
            # The parts have a float32 stream.
            assert not precision(narrow.workload.dtype).narrow_stream
            setting = energy_by_part.setting_of(narrow.workload, QuietBench.device)
            assert setting.gradients == torch.bfloat16
        assert set(energy_by_part.USUAL) <= set(energy_by_part.RACES)
        assert set(RACES) - set(energy_by_part.RACES) == {"8b-32768", "tiny-64"}

    def test_attention_and_blocks_can_be_chosen(self) -> None:
        mine = energy_by_part.our_racer("2.7b-2048", "sdpa_cudnn", 8)
        assert mine.name == "ours: eager sdpa_cudnn joined keeps gates updates in backward graph"
        setting = energy_by_part.setting_of(mine.workload, QuietBench.device)
        assert (setting.config.n_layers, setting.config.d_model) == (8, 2560)
        assert (setting.tokens, setting.keep, setting.attention) == (8192, GATES, "sdpa_cudnn")
        for layers in (0, 33):
            with pytest.raises(UsageError, match="name 1 to 32"):
                energy_by_part.our_racer("2.7b-512", "auto", layers)

    def test_fewer_blocks_are_scaled_up_by_the_work_of_each_part(self) -> None:
        whole = with_overrides(find_size("xl"), context=512)
        half = with_overrides(whole, n_layers=24)
        parts = (PRODUCTS, ATTENTION, UPDATES, PASSES, PEERS_PRODUCTS, WHOLE)
        times = {part: to_whole(part, whole, half, 4, 512) for part in parts}
        assert times[ATTENTION] == times[PASSES] == 2
        block, head = 4 * 1600**2 + 3 * 1600 * 6400, 10_000 * 1600
        exact = (48 * block + head) / (24 * block + head)
        assert times[PRODUCTS] == times[PEERS_PRODUCTS] == pytest.approx(exact, rel=1e-12)
        others = 2 * head + 1600
        exact = (48 * (block + 3200) + others) / (24 * (block + 3200) + others)
        assert times[UPDATES] == pytest.approx(exact, rel=1e-12)
        assert times[PRODUCTS] < times[WHOLE] < 2
        assert to_whole(WHOLE, whole, whole, 4, 512) == 1


def test_an_account_adds_up() -> None:
    lines = energy_lines()
    (account,) = accounts(lines)
    assert account.all_parts is not None
    assert (account.all_parts.ms, account.all_parts.joules) == (64.0, 40.0)
    assert account.all_parts.watts == 625
    assert account.needed is not None
    assert (account.needed.joules, account.lasts_ms(account.needed.joules)) == (37.5, 75.0)
    assert [row.part for row in account.rows()] == [
        PRODUCTS, ATTENTION, UPDATES, PASSES, "sum of the parts", WHOLE, PEERS_PRODUCTS,
    ]  # fmt: skip
    assert [account.of_the_step(row.joules) for row in account.rows()] == [
        0.5, 0.0625, 0.375, 0.0625, 1.0, 1.0, 0.625,
    ]  # fmt: skip
    rates = [row.rate for row in account.rows()]
    assert rates == [7e14, *[None] * 5, 5.6e14]
    said = list(energy_by_part.table(account))
    assert said[1].split() == [
        "products",
        "40.000",
        "20.000",
        "0.250",
        "500",
        "1700",
        "50.0%",
        "700",
    ]
    assert said[-2] == "The whole step takes 0.00 J more than its parts together."
    assert said[-1] == (
        "With only products, attention and AdamW left it would take 37.50 J: not less than 75.0 ms"
        " at 500 W."
    )


def test_a_part_that_is_missing_leaves_no_sum() -> None:
    lines = [line | {"lost": "out of memory"} if line["part"] == PASSES else line
             for line in energy_lines()]  # fmt: skip
    (account,) = accounts(lines)
    assert account.all_parts is None
    assert account.needed is not None
    assert account.lost == {PASSES: "out of memory"}


def run_benchmark(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "benchmarks/energy_by_part.py", *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=400,
    )  # fmt: skip


@pytest.mark.skipif(torch.cuda.is_available(), reason="here it would measure")
def test_without_a_gpu_it_says_what_it_needs() -> None:
    done = run_benchmark("xl-512", "--layers", "2")
    assert done.returncode == 1
    assert done.stdout.startswith("needs an NVIDIA GPU")
    assert "Traceback" not in done.stderr


def test_others_races_stay_in_the_file(tmp_path: Path) -> None:
    held = [{"race": "xl-512", "part": "a"}, {"race": "2.7b-512", "part": "a"}]
    path = tmp_path / "lines.jsonl"
    assert energy_by_part.others(path, ["xl-512"]) == []
    path.write_text("".join(json.dumps(line) + "\n" for line in held))
    assert energy_by_part.others(path, ["xl-512"]) == held[1:]
    assert energy_by_part.others(None, ["xl-512"]) == []
