"""Changes are tried on a script in several ranks: all of them have the same turns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from command_line import CommandLine, python
from own_records import advice
from quiet_bench import QuietBench
from stepscope.advisor.advise.cases import Script, Trial
from stepscope.advisor.advise.interleaved import ScriptEndedError
from stepscope.advisor.advise.script_trial import measure_script_trial
from stepscope.records.schema import Ceiling
from stepscope.studies.base import Measurement
from stepscope.views.program.rows import ProgramRecord

SCRIPT = """
import json, sys, time, torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
dist.init_process_group("gloo")
torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)])
if sys.argv[1] == "fsdp2":
    fully_shard(model)
else:
    model = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
torch.manual_seed(dist.get_rank())
for step in range(100_000):
    if dist.get_rank() == 1 and "slow" in sys.argv:
        time.sleep(0.02)
    if dist.get_rank() == 1 and step == 3 and "fail" in sys.argv:
        raise ValueError("a rank has failed")
    model(torch.randn(8, 64)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 2 and dist.get_rank() == 0:
        if sys.argv[1] == "fsdp2":
            units = [one for one in model.modules() if hasattr(one, "_get_fsdp_state")]
            seen = [len(one._get_fsdp_state()._states_to_forward_prefetch) for one in units]
        else:
            seen = [model.bucket_bytes_cap >> 20, model.static_graph]
            seen.append(model.gradient_as_bucket_view)
        with open("seen.txt", "a") as file:
            print(json.dumps(seen), file=file)
"""


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    for name, value in (("OMP_NUM_THREADS", "1"), ("GLOO_SOCKET_IFNAME", "lo")):
        monkeypatch.setenv(name, value)


def measured(*words: str, **setting: str) -> Measurement:
    script = Script(target="train.py", words=words, ranks=2)
    trial = Trial(
        program=script,
        step_ms=1.0,
        rounds=5,
        loss_steps=8,
        advice=(advice("a-change", 0.5, **setting),),
    )
    return measure_script_trial(trial, script, QuietBench())


@pytest.mark.parametrize(
    ("kind", "setting", "base", "changed"),
    [
        (
            "ddp",
            {"bucket_mb": "3", "static_graph": "yes", "gradient_views": "yes"},
            [25, False, False],
            [3, True, True],
        ),
        (
            "fsdp2",
            {"units": "blocks", "reshard": "no", "prefetch": "2"},
            [0],
            [2, 2, 2, 1, 0],
        ),
    ],
)
def test_options_of_wrappers_are_changed_on_all_ranks(
    kind: str, setting: dict[str, str], base: list[int], changed: list[int], tmp_path: Path
) -> None:
    result = measured(kind, "slow", **setting)
    assert result.notes == {}
    series = {(one.name, one.variant): one.values for one in result.series}
    assert len(series["step", "base"]) == len(series["step", "changed"]) == 5
    # The slow rank sleeps in each step.
    assert min(series["step", "base"]) >= 20.0
    assert series["loss", "base"] == pytest.approx(series["loss", "changed"], rel=1e-5)
    seen = [json.loads(line) for line in (tmp_path / "seen.txt").read_text().splitlines()]
    assert sorted(seen) == sorted([base, changed])


def test_the_error_of_a_rank_is_reported() -> None:
    with pytest.raises(ScriptEndedError, match="a rank has failed"):
        measured("ddp", "fail", optimizer="adamw-fused")


def test_under_torchrun_all_ranks_are_recorded_and_changes_verified(tmp_path: Path) -> None:
    command = CommandLine(tmp_path)
    command.know_ceilings(Ceiling(name="memory.copy", value=1e10, unit="B/s", source="measured"))
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    words = "advise --verify --rounds 5 --loss-steps 4 --only gradient-views --json train.py ddp"
    done = python(
        *torchrun, "-m", "stepscope", *words.split(), cwd=tmp_path, env=command.environment
    )
    assert done.returncode == 0, done.stderr
    (tried,) = json.loads(done.stdout)["tried"]
    assert tried["change"] == "gradient-views"
    assert tried["interval_ms"] is not None
    programs = [ProgramRecord(one) for one in command.records() if one.study == "inspect"]
    ranks = sorted(programs, key=lambda one: one.rank)
    assert [(one.rank, one.case.ranks) for one in ranks] == [(0, 2), (1, 2)]
    sharing = ranks[0].setting.sharing if ranks[0].setting else None
    assert sharing is not None
    assert (sharing.kind, sharing.finds_unused, sharing.tensors) == ("ddp", True, 8)
