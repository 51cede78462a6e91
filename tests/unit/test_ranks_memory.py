"""The memory that studies on several ranks need by the prediction, and the refusal of the rest."""

from __future__ import annotations

from typing import Any

import pytest

from quiet_bench import QuietBench
from stepscope.model.cost import parameters
from stepscope.studies.base import CaseSkipped
from stepscope.studies.registry import find_study
from stepscope.training.ranks import memory
from stepscope.training.ranks.memory import Kind, Need, Room, need_of, require_memory, smaller

DDP, SHARDING = Kind(), Kind(fused=True, slices=True)


def case_of(study: str, size: str, ranks: int = 2, **options: Any) -> Any:
    found = find_study(study)
    (case,) = found.cases(found.flags(size=(size,), ranks=(ranks,), **options))
    return case


def have(monkeypatch: pytest.MonkeyPatch, gib: float) -> None:
    room = Room(device=int(gib * 2**30), devices=1, host=int(gib * 2**30))
    monkeypatch.setattr(memory, "room_of", lambda _: room)


@pytest.mark.parametrize("table", ["2025", "2026"])
@pytest.mark.parametrize(("study", "kind"), [("ddp", DDP), ("sharding", SHARDING)])
def test_xl_fits_on_two_gpus_of_80_gb(study: str, kind: Kind, table: str) -> None:
    case = case_of(study, "xl", table=table)
    need = need_of(case, "cuda", kind, gloo=False)
    assert 16 * parameters(case.shape).total < need.device
    assert Room(device=80 * 10**9, devices=2, host=64 * 10**9).fits(need, 2)
    assert not Room(device=80 * 10**9, devices=1, host=64 * 10**9).fits(need, 2)


@pytest.mark.parametrize(("study", "kind"), [("ddp", DDP), ("sharding", SHARDING), ("fsdp", DDP)])
def test_small_on_two_ranks_fits_in_12_gb(study: str, kind: Kind) -> None:
    need = need_of(case_of(study, "small"), "cpu", kind)
    assert Room(device=12 * 10**9, devices=1, host=12 * 10**9).fits(need, 2)


def test_the_need_does_not_depend_on_the_number_of_strategies() -> None:
    few, many = (case_of("ddp", "small", bucket_mb=mb) for mb in ((1.0,), (1.0, 2.0, 4.0, 8.0)))
    assert need_of(few, "cpu", DDP) == need_of(many, "cpu", DDP)


@pytest.mark.parametrize(
    ("gib", "options", "hint"),
    [
        (9.0, {"batch": 2, "context": (4096,)}, "; --context 1024 fits"),
        (11.0, {"batch": 64}, "; --batch 2 fits"),
        (6.0, {}, "; --dtype bfloat16-pure fits"),
        (7.2, {"dtype": ("bfloat16-pure",), "ranks": 4}, "; --ranks 3 fits"),
        (3.1, {}, "; --size midi fits"),
        (0.5, {}, ""),
    ],
)
def test_a_case_is_refused_with_the_flag_that_makes_it_fit(
    monkeypatch: pytest.MonkeyPatch, gib: float, options: dict[str, Any], hint: str
) -> None:
    case = case_of("ddp", "small", **{"batch": 12, **options})
    have(monkeypatch, gib)
    with pytest.raises(CaseSkipped) as refused:
        require_memory(case, QuietBench().device, DDP)
    needed = case.ranks * need_of(case, "cpu", DDP).device / 2**30
    assert str(refused.value) == (
        f"{case.ranks} ranks need {needed:.3g} GiB of host memory by the prediction, and"
        f" {memory.bytes_(gib * 2**30)} are available{hint}"
    )
    fitting = dict(smaller(case)).get(hint.removeprefix("; ").removesuffix(" fits"))
    if fitting is not None:
        require_memory(fitting, QuietBench().device, DDP)


def test_a_user_s_model_is_refused_by_its_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of("ddp", "small", model="own_models:causal_lm")
    have(monkeypatch, 1.0)
    with pytest.raises(CaseSkipped, match="2 ranks need at least 1"):
        require_memory(case, QuietBench().device, DDP)
    have(monkeypatch, 4.0)
    require_memory(case, QuietBench().device, DDP)


def test_ranks_that_share_a_gpu_share_its_memory() -> None:
    need, gpu = Need(device=40, host=10), Room(device=80, devices=2, host=100)
    assert gpu.fits(need, 4)
    assert not gpu.fits(need, 5)
    assert not gpu._replace(host=39).fits(need, 4)


def test_a_follower_leaves_the_decision_to_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, 0.1)
    for name, value in {"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": "2", "RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    require_memory(case_of("ddp", "small"), QuietBench().device, DDP)


@pytest.mark.parametrize("study", ["ddp", "sharding", "fsdp"])
def test_no_rank_starts_for_a_case_that_does_not_fit(
    monkeypatch: pytest.MonkeyPatch, study: str
) -> None:
    have(monkeypatch, 0.5)
    monkeypatch.setattr("stepscope.parallel.launch", lambda *_, **__: pytest.fail("started"))
    with pytest.raises(CaseSkipped, match="by the prediction"):
        find_study(study).measure(case_of(study, "small"), QuietBench())
