"""Patches of training scripts: edits at observed places, and the patched script against the
original."""

from __future__ import annotations

import math
import subprocess
import textwrap
from pathlib import Path

import msgspec
import pytest

from own_records import advice, inspected_record, tried
from quiet_bench import QuietBench
from stepscope.advisor.advise.cases import Script, Trial
from stepscope.advisor.patch.apply import Gain, make_patch, measure_patch, observe_sites
from stepscope.advisor.patch.edits import Edits
from stepscope.advisor.patch.losses import Losses, compare_losses
from stepscope.advisor.patch.sites import Sites
from stepscope.cli import main, patching
from stepscope.records.jsonl import write_records
from stepscope.records.stats import judge

PARTS = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(8, 16)
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)])
        self.drop = torch.nn.Linear(16, 4)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = torch.relu(block(x))
        return self.drop(x)

class Momentum(torch.optim.Optimizer):
    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr, "betas": (0.9, 0.99), "eps": 1e-8})
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p -= group["lr"] * p.grad

def loss_of(model, x, y):
    # Called from the loop.
    out = model(x)
    return torch.nn.functional.mse_loss(out, y)

def make_optimizer(net):
    return torch.optim.AdamW(net.parameters(), lr=1e-3, foreach=False)
"""
TRAIN = """
import torch
from torch.utils.data import DataLoader, TensorDataset
from parts import Net, loss_of, make_optimizer

def main():
    model = Net()
    optimizer = make_optimizer(model)
    data = TensorDataset(torch.randn(800, 8), torch.randn(800, 4))
    for x, y in DataLoader(
        data,
        batch_size=4,  # small
        shuffle=True,
    ):
        loss = loss_of(model, x, y)
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        optimizer.step()

if __name__ == "__main__":
    main()
"""


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)


def write(text: str, name: str = "train.py") -> Path:
    path = Path(name)
    path.write_text(textwrap.dedent(text))
    return path


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Sites]:
    """The script above in its folder, and what was observed in it."""
    folder = tmp_path_factory.mktemp("observed")
    (folder / "parts.py").write_text(PARTS)
    (folder / "train.py").write_text(TRAIN)
    return folder, observe_sites(Script(target=str(folder / "train.py")))


def edited(seen: tuple[Path, Sites], **settings: str) -> tuple[dict[str, list[str]], list[str]]:
    """Return the new lines of each file, and what is left to the user."""
    folder, sites = seen
    edits = Edits(settings, sites).make()
    new: dict[str, list[str]] = {}
    for path, data in edits.changed.items():
        old = Path(path).read_text().splitlines()
        new[Path(path).name] = [line for line in data.decode().splitlines() if line not in old]
        assert Path(path).parent == folder
    return new, [one.what for one in edits.by_hand]


def test_autocast_wraps_the_statement_whose_function_calls_the_model(
    seen: tuple[Path, Sites],
) -> None:
    new, left = edited(seen, dtype="bfloat16")
    assert left == []
    assert new == {
        "train.py": [
            '        with torch.autocast("cpu", torch.bfloat16):',
            "            loss = loss_of(model, x, y)",
        ]
    }


def test_loader_and_gradients(seen: tuple[Path, Sites]) -> None:
    new, left = edited(seen, data="workers", gradients="none")
    assert left == []
    (workers,) = (line for line in new["train.py"] if "num_workers" in line)
    assert workers.startswith("        num_workers=")
    assert "        persistent_workers=True," in new["train.py"]
    assert "        optimizer.zero_grad(set_to_none=True)" in new["train.py"]


def test_optimizer_is_edited_in_the_file_that_makes_it(seen: tuple[Path, Sites]) -> None:
    new, left = edited(seen, optimizer="adamw-fused")
    assert left == []
    assert new == {
        "parts.py": ["    return torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)"]
    }


@pytest.mark.parametrize(
    ("how", "lines"),
    [
        ("model", ["    model.compile()"]),
        ("graphs", ['    model.compile(mode="reduce-overhead")']),
        ("block", ["    for block in model.blocks:", "        block.compile()"]),
    ],
)
def test_compile_follows_the_optimizer_where_the_model_has_a_name(
    seen: tuple[Path, Sites], how: str, lines: list[str]
) -> None:
    new, left = edited(seen, compile=how)
    assert (new, left) == ({"train.py": lines}, [])


def test_accelerate_needs_the_variable_of_the_optimizer(seen: tuple[Path, Sites]) -> None:
    new, left = edited(seen, accelerate="accelerate", optimizer="adamw-fused")
    assert left == ["stepscope.accelerate"]
    assert set(new) == {"parts.py"}
    assert "fused=True" in new["parts.py"][0]


def test_edits_that_are_not_safe_are_left_to_the_user(seen: tuple[Path, Sites]) -> None:
    new, left = edited(seen, batch="8", checkpoint="blocks", read_back="late")
    assert new == {}
    assert set(left) == {"the batch size", "activation checkpointing", "values read back"}


STEP = """
import torch
from torch import nn

def main():
    model = nn.Linear(8, 4)
    criterion = nn.MSELoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(100):
        x = torch.randn(4, 8)
        y = x[:, :4]
        optimizer.zero_grad()
        out = model(x)
        loss = criterion(out, y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if number % 50 == 0:
            print(loss.item())

main()
"""


# In records of older versions, `accelerate` has a setting for each part of the step.
@pytest.mark.parametrize("name", ["accelerate", "norm"])
def test_accelerate_names_model_and_optimizer(name: str) -> None:
    script = Script(target=str(write(STEP)))
    patch = make_patch(script, {name: "accelerate"}, "accelerate")
    (new,) = patch.files.values()
    lines = new.decode().splitlines()
    assert "import stepscope" in lines
    made = lines.index("    stepscope.accelerate(model, optimizer)")
    assert "torch.optim.SGD" in lines[made - 1]


def test_loop_becomes_a_train_step_that_trains_the_same() -> None:
    script = Script(target=str(write(STEP)))
    patch = make_patch(script, {"step": "graph"}, "a step")
    (new,) = patch.files.values()
    assert new.decode() == STEP.replace(
        """    for number""",
        """
    def loss_fn(model, batch):
        x, y = batch
        out = model(x)
        loss = criterion(out, y)
        return loss

    train_step = stepscope.TrainStep(model, optimizer, loss_fn=loss_fn, max_grad_norm=1.0)
    for number""",
    ).replace("nn\n\ndef", "nn\nimport stepscope\n\ndef").replace(
        """        optimizer.zero_grad()
        out = model(x)
        loss = criterion(out, y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
""",
        "        loss = train_step((x, y))\n",
    )
    gain = measure_patch(patch, 5, 8, QuietBench())
    assert gain.losses.outcome == "alike"
    assert gain.losses.steps >= 8
    # The file was not touched.
    assert Path("train.py").read_text() == STEP


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("print(loss.item())", "print(loss.item(), out.mean())"),
        ("        nn.utils.clip", "        norm = nn.utils.clip"),
        ("y = x[:, :4]", "y = 0.5"),
        ("        loss.backward()", "        (loss / 2).backward()"),
    ],
)
def test_loops_that_do_more_are_not_made_a_train_step(old: str, new: str) -> None:
    assert old in STEP
    text = STEP.replace(old, new)
    if new == "y = 0.5":
        text = text.replace("criterion(out, y)", "criterion(out, x[:, :4] * y)")
    patch = make_patch(Script(target=str(write(text))), {"step": "graph"}, "a step")
    assert patch.files == {}
    (left,) = patch.by_hand
    assert left.what == "stepscope.TrainStep"
    assert left.why


DISABLED = """
import torch
from parts import Net, Momentum
torch.manual_seed(1)
model = Net()
optimizer = Momentum(model.parameters(), lr=1e-2)
for _ in range(100):
    x = torch.randn(16, 8)
    with torch.autocast("cpu", torch.bfloat16, enabled=False):
        loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_disabled_autocast_and_own_adam_are_rewritten() -> None:
    write(PARTS, "parts.py")
    script = Script(target=str(write(DISABLED)))
    patch = make_patch(script, {"dtype": "bfloat16", "optimizer": "adamw-fused"}, "changes")
    assert patch.by_hand == ()
    (new,) = patch.files.values()
    assert b"torch.bfloat16, enabled=True)" in new
    assert b"torch.optim.AdamW(" in new
    assert b"lr=1e-2" in new
    assert b"fused=True" in new


BROKEN = "raise ValueError('no data')\n"


def test_script_that_fails_gives_its_error() -> None:
    write("import torch\n" + BROKEN)
    with pytest.raises(Exception, match="no data"):
        make_patch(Script(target="train.py"), {"dtype": "bfloat16"}, "changes")


# The command line.


def verified(times: float = 30.0, script: str = "train.py") -> Path:
    """Write the records of a verified change of the script; return their file."""
    change = advice("set-to-none", gradients="none")
    record = tried(times, change)
    trial = Trial(program=Script(target=script), advice=(change,), step_ms=100.0)
    record = msgspec.structs.replace(record, config=msgspec.to_builtins(trial))
    path = Path("records.jsonl")
    write_records([inspected_record(), record], path)
    return path


FILLED = STEP.replace("zero_grad()", "zero_grad(set_to_none=False)")
CLEARED = STEP.replace("zero_grad()", "zero_grad(set_to_none=True)")
QUICK = ("--rounds", "5", "--loss-steps", "8")


def test_apply_writes_a_patch_from_verified_records_and_no_other_file() -> None:
    script, records = write(FILLED), verified()
    assert main(["advise", "--apply", "--keep", *QUICK, str(records)]) == 0
    assert script.read_text() == FILLED
    patch = Path("train.stepscope.patch")
    head = [line for line in patch.read_text().splitlines() if line.startswith("#")]
    assert any("a step" in line and "interval" in line for line in head)
    assert any("losses over" in line and "no difference" in line for line in head)
    subprocess.run(["patch", "-p1", "-i", patch.name], check=True, capture_output=True)
    assert script.read_text() == CLEARED


def test_patch_is_applied_in_place_on_request() -> None:
    script, records = write(FILLED), verified()
    words = ["--apply", "--in-place", "--keep", "--patch", "other.patch", *QUICK]
    assert main(["advise", *words, str(records)]) == 0
    assert script.read_text() == CLEARED
    assert Path("other.patch").exists()


def test_patch_without_a_gain_is_not_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(FILLED)
    alike = Losses("alike", 20, 0.0, -0.001, 0.001)
    slower = judge([1.0] * 15, [1.0 + 0.001 * i for i in range(15)], "paired")
    gain = Gain(base_ms=1.0, changed_ms=1.0, times=slower, losses=alike, rounds=15)
    monkeypatch.setattr(patching, "measure_patch", lambda *_: gain)
    assert main(["advise", "--apply", str(verified())]) == 0
    assert not Path("train.stepscope.patch").exists()
    faster = judge([2.0] * 15, [1.0 + 0.001 * i for i in range(15)], "paired")
    gain = msgspec.structs.replace(gain, times=faster)
    assert main(["advise", "--apply", str(verified())]) == 0
    assert Path("train.stepscope.patch").exists()
    Path("train.stepscope.patch").unlink()
    said = capsys.readouterr()
    assert "no patch: the patched script is not shown to be faster" in said.err
    assert f"apply it: git -C {Path.cwd()} apply" in said.err
    assert "Next:" not in said.out
    gain = msgspec.structs.replace(gain, losses=Losses("differ", 20, 0.1, 0.09, 0.11))
    assert main(["advise", "--apply", str(verified())]) == 0
    assert not Path("train.stepscope.patch").exists()
    assert "no patch: its losses differ" in capsys.readouterr().err
    few = judge([2.0] * 8, [1.0 + 0.001 * i for i in range(8)], "paired")
    gain = msgspec.structs.replace(gain, times=few, losses=alike, rounds=8)
    assert main(["advise", "--apply", str(verified())]) == 0
    assert "8 rounds are too few to show a gain" in capsys.readouterr().err


def test_patched_script_that_fails_is_not_kept(capsys: pytest.CaptureFixture[str]) -> None:
    write(FILLED)
    records = verified()
    write("import sys\n" + FILLED.replace("range(100)", "range(8)"))
    assert main(["advise", "--apply", *QUICK, str(records)]) == 1
    assert not Path("train.stepscope.patch").exists()
    assert "could not be compared" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["--keep", "train.py"],
        ["--in-place", "train.py"],
        ["--apply", "--model", "a:b"],
        ["--apply", "none.jsonl"],
        ["--apply", "base.jsonl"],
    ],
)
def test_command_lines_without_a_script_to_patch(words: list[str]) -> None:
    write(FILLED)
    write_records([inspected_record()], Path("base.jsonl"))
    assert main(["advise", *words]) == 2


def test_script_that_is_elsewhere_is_not_patched() -> None:
    assert main(["advise", "--apply", str(verified(script="elsewhere.py"))]) == 2


def test_no_kept_change_is_no_patch() -> None:
    write(FILLED)
    assert main(["advise", "--apply", str(verified(times=80.0))]) == 0
    assert not Path("train.stepscope.patch").exists()


def test_losses() -> None:
    base = [2.0 - 0.02 * i for i in range(40)]
    rounded = [value * (1 + 1e-6 * (-1) ** i) for i, value in enumerate(base)]
    assert compare_losses(base, base).outcome == "alike"
    assert compare_losses(base, rounded).outcome == "alike"
    assert compare_losses(base, [1.03 * value for value in rounded]).outcome == "differ"
    assert compare_losses(base, [*base[:20], *[None] * 20]).outcome == "differ"
    assert compare_losses(base[:3], base[:3]).outcome == "cannot tell"
    noisy = [value + 0.9 * math.sin(7.0 * i * i) for i, value in enumerate(base)]
    assert compare_losses(base, noisy).outcome == "cannot tell"
