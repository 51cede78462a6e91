"""Patches of programs of other libraries, and of the examples: the expected edits, and the same
training."""

from __future__ import annotations

from pathlib import Path

import foreign_runs as runs
import pytest
import vision

from quiet_bench import QuietBench
from stepscope.advisor.advise.cases import Script
from stepscope.advisor.patch.apply import make_patch, measure_patch

AUTOCAST = "with torch.autocast(given.device, torch.bfloat16, enabled=True):"
NARROW = {"dtype": "bfloat16", "optimizer": "adamw-fused"}
ADAMW = "optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, fused=True)"
IN_EXAMPLES = "with torch.autocast(args.device, torch.bfloat16, enabled=True):"
ADAMW_OF_EXAMPLES = (
    "optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, fused=True)"
)
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
    "examples/slow": (
        NARROW | {"attention": "fused", "compile": "model", "gradients": "none"},
        [
            'with torch.autocast("cpu", torch.bfloat16):',
            "optimizer.zero_grad(set_to_none=True)",
            'model.compile(backend="stepscope")',
            "fused=True,",
        ],
        [],
    ),
    "examples/nano_gpt": (
        NARROW | {"data": "workers"},
        ['with torch.autocast("cpu", torch.bfloat16):', "fused=True,"],
        ["workers for the DataLoader"],
    ),
    "examples/vit": (
        NARROW | {"data": "workers"},
        [
            'with torch.autocast("cpu", torch.bfloat16):',
            "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)",
            "persistent_workers=True,",
        ],
        [],
    ),
    "examples/cs336_lm": (
        NARROW | {"accelerate": "accelerate"},
        [
            IN_EXAMPLES,
            ADAMW_OF_EXAMPLES,
            "stepscope.accelerate(model, optimizer)",
        ],
        [],
    ),
    "examples/hf_llama": (NARROW, [IN_EXAMPLES, ADAMW_OF_EXAMPLES], []),
    "examples/timm_vit": (
        NARROW,
        [
            IN_EXAMPLES,
            ADAMW_OF_EXAMPLES.replace("lr=3e-4, weight_decay=0.1", "lr=1e-3, weight_decay=0.05"),
        ],
        [],
    ),
    "examples/hf_trainer": (
        NARROW | {"data": "workers"},
        ['optim="adamw_torch_fused",', "bf16=True,", "dataloader_num_workers=1,"],
        [],
    ),
    "examples/lightning_gpt": (
        NARROW,
        ['precision="bf16-mixed",'],
        # Its Trainer clips gradients.
        ["the optimizer"],
    ),
}
"""Settings, lines that the patch has, and what is left to the user."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=vision.needed("timm") if "timm" in name else ()) for name in CASES],
)
def test_program_is_patched_and_trains_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, lines, left = CASES[name]
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    folder = runs.ROOT if name.startswith("examples/") else runs.PROGRAMS
    program = folder / f"{name}.py"
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
