"""Runs of the programs in benchmarks/programs, cached per test process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from stepscope.records.jsonl import read_records
from stepscope.records.schema import Record
from stepscope.views.program.rows import ProgramRecord

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ROOT / "benchmarks" / "programs"
HOOK = ROOT / "benchmarks" / "independent_hook.py"
STEPS = 16
PLAN = ("--warmup", "2", "--steps", "5", "--profiled-steps", "2")
"""Eleven steps are recorded, so the last steps of a program run unobserved."""
TIMEOUT_S = 600


@dataclass(frozen=True)
class Program:
    name: str
    model_files: tuple[str, ...] = ()
    """Files with the model's code, if not the program itself."""
    naive_attention: bool | None = None
    """None without attention."""
    attention_dropout: bool = False
    """Dropout prevents the fused attention kernel on a CPU."""
    closure: bool = False
    """The optimizer runs forward and backward inside its step."""
    ranks: int = 1
    needs: str = ""
    """Library that is not in every set-up."""

    @property
    def path(self) -> Path:
        return PROGRAMS / f"{self.name}.py"

    @property
    def code_files(self) -> tuple[str, ...]:
        return self.model_files or (self.path.name,)


ALL = (
    Program("hf_llama", ("modeling_llama.py",), naive_attention=True),
    Program(
        "hf_gpt2_trainer", ("modeling_gpt2.py",), naive_attention=False, attention_dropout=True
    ),
    Program(
        "hf_bert_accelerate", ("modeling_bert.py",), naive_attention=False, attention_dropout=True
    ),
    Program("peft_lora_llama", ("modeling_llama.py",), naive_attention=False),
    Program("hf_vit", ("modeling_vit.py",), naive_attention=True),
    Program(
        "timm_vit",
        ("vision_transformer.py", "attention.py"),
        naive_attention=False,
        needs="timm",
    ),
    Program("timm_convnext", ("convnext.py", "norm.py", "mlp.py"), needs="timm"),
    Program("torchvision_reference", ("resnet.py",), needs="torchvision"),
    Program("lightning_cnn", closure=True),
    Program("lightning_transformer", naive_attention=False, closure=True),
    Program("torch_mnist"),
    Program("torch_word_language_model"),
    Program("torch_dcgan"),
    Program("torch_vae"),
    Program("nano_gpt", naive_attention=True),
    Program("torch_time_sequence", closure=True),
    Program("torch_optimizer_in_backward"),
    Program("torch_ddp", ranks=2),
)
BY_NAME = {program.name: program for program in ALL}


@cache
def folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="stepscope-integrations-"))


def environment() -> dict[str, str]:
    """Environment with one thread, so that sums have a fixed order, and without downloads."""
    return os.environ | {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "STEPSCOPE_OUT": str(folder()),
        "XDG_CACHE_HOME": str(folder() / "cache"),
        "TMPDIR": str(folder()),
    }


def run(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        env=environment() | more,
        cwd=folder(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )


def run_ranks(program: Program, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run under torchrun if the program needs several ranks."""
    if program.ranks == 1:
        return run(*words, **more)
    ranks = ("--standalone", "--nproc-per-node", str(program.ranks))
    return run("-m", "torch.distributed.run", *ranks, *words, **more)


@dataclass(frozen=True)
class Inspected:
    done: subprocess.CompletedProcess[str]
    page: Path

    @property
    def messages(self) -> list[str]:
        """Lines that Stepscope itself wrote to standard error."""
        lines = self.done.stderr.splitlines()
        return [line for line in lines if line.startswith("stepscope:")]

    @cached_property
    def records(self) -> tuple[Record, ...]:
        path = self.page.with_suffix(".jsonl")
        assert path.exists(), self.done.stderr[-2000:]
        return read_records(path)

    @property
    def watched(self) -> ProgramRecord:
        return ProgramRecord(self.records[0])


def inspect(program: Program, *words: str, name: str = "") -> Inspected:
    page = folder() / f"{name or program.name}.html"
    command = ("-m", "stepscope", "inspect", *PLAN, "--page", str(page), str(program.path), *words)
    return Inspected(run_ranks(program, *command), page)


@cache
def plain_run(program: Program) -> subprocess.CompletedProcess[str]:
    return run_ranks(program, str(program.path), "--steps", str(STEPS))


@cache
def inspected_run(program: Program) -> Inspected:
    return inspect(program, "--steps", str(STEPS))


@cache
def advice_on_records(program: Program) -> dict[str, Any]:
    """Return the JSON of `stepscope advise RECORDS`."""
    records = inspected_run(program).page.with_suffix(".jsonl")
    done = run("-m", "stepscope", "advise", "--json", str(records))
    assert done.returncode == 0, done.stderr[-2000:]
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def counted_flops(program: Program) -> int:
    """FLOPs of one late step, counted without Stepscope."""
    times = folder() / f"{program.name}-flops.json"
    done = run_ranks(
        program, str(HOOK), str(times), str(program.path), "--steps", "5", COUNT_FLOPS="3"
    )
    assert done.returncode == 0, done.stderr[-2000:]
    flops = json.loads(times.read_text())["flops"]
    assert isinstance(flops, int)
    return flops
