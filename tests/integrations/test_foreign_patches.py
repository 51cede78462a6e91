"""Patches of programs of other libraries: the expected edits, and the same training."""

from __future__ import annotations

from pathlib import Path

import foreign_runs as runs
import pytest

from quiet_bench import QuietBench
from stepscope.advisor.advise.cases import Script
from stepscope.advisor.patch.apply import make_patch, measure_patch

AUTOCAST = "with torch.autocast(given.device, torch.bfloat16, enabled=True):"
NARROW = {"dtype": "bfloat16", "optimizer": "adamw-fused"}
ADAMW = "optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, fused=True)"
CASES: dict[str, tuple[dict[str, str], list[str], list[str]]] = {
    "hf_llama": (
        NARROW | {"data": "workers", "attention": "fused"},
        [AUTOCAST, 'attn_implementation="sdpa",', "persistent_workers=True,"],
        [],
    ),
    "hf_vit": (NARROW | {"attention": "fused"}, [AUTOCAST, 'attn_implementation="sdpa",'], []),
    "hf_gpt2_trainer": (
        NARROW | {"data": "workers"},
        ['optim="adamw_torch_fused",', "bf16=True,", "dataloader_prefetch_factor=4,"],
        [],
    ),
    "hf_bert_accelerate": (NARROW, ['mixed_precision="bf16",', ADAMW], []),
    "lightning_cnn": (
        NARROW,
        [
            'precision="bf16-mixed",',
            "return torch.optim.Adam(self.parameters(), lr=1e-3, fused=True)",
        ],
        [],
    ),
    "peft_lora_llama": (
        NARROW,
        [AUTOCAST, "optimizer = torch.optim.AdamW(trained, lr=1e-3, fused=True)"],
        [],
    ),
    "torch_dcgan": ({"dtype": "bfloat16"}, [AUTOCAST] * 3, []),
    "nano_gpt": (NARROW, [AUTOCAST], []),
    "torch_vae": (NARROW, [AUTOCAST], []),
    "torch_mnist": ({"optimizer": "adamw-fused", "data": "workers"}, [], ["the optimizer"]),
}
"""Settings, lines that the patch has, and what is left to the user."""


@pytest.mark.parametrize("name", CASES)
def test_program_is_patched_and_trains_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, lines, left = CASES[name]
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    program = runs.ROOT / "benchmarks" / "programs" / f"{name}.py"
    script = Script(target=str(program), words=("--device", "cpu", "--steps", "60"))
    patch = make_patch(script, settings, "changes")
    assert [one.what for one in patch.by_hand] == left
    (path,) = patch.files
    assert Path(path) == program
    new = [line.strip() for line in patch.files[path].decode().splitlines()]
    for line in lines:
        assert new.count(line) == lines.count(line), line
    gain = measure_patch(patch, 5, 8, QuietBench())
    assert gain.losses.steps >= 8
    # Where dropout draws other masks, a few losses cannot show it.
    assert gain.losses.outcome != "differ"
