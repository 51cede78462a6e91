"""Arguments of training libraries that make a change, in place of code in the loop."""

from __future__ import annotations

OF_LIBRARIES = {
    "training_arguments": ("transformers.training_args", "TrainingArguments"),
    "accelerator": ("accelerate.accelerator", "Accelerator"),
    "lightning": ("lightning.pytorch.trainer.trainer", "Trainer"),
    "pytorch_lightning": ("pytorch_lightning.trainer.trainer", "Trainer"),
    "config": ("transformers.configuration_utils", "PretrainedConfig"),
}
"""Module and class of each kind of object."""

LIGHTNING = ("lightning", "pytorch_lightning")
_PRECISION = {
    ("dtype", "bfloat16"): {"precision": '"bf16-mixed"'},
    ("dtype", "float32"): {"precision": '"32-true"'},
}
ARGUMENTS: dict[str, dict[tuple[str, str], dict[str, str]]] = {
    "training_arguments": {
        ("dtype", "bfloat16"): {"bf16": "True"},
        ("dtype", "float32"): {"bf16": "False", "fp16": "False"},
        ("dtype", "tf32"): {"tf32": "True"},
        ("optimizer", "adamw-fused"): {"optim": '"adamw_torch_fused"'},
        ("compile", "model"): {"torch_compile": "True"},
        ("compile", "graphs"): {
            "torch_compile": "True",
            "torch_compile_mode": '"reduce-overhead"',
        },
        ("data", "workers"): {
            "dataloader_num_workers": "{workers}",
            "dataloader_persistent_workers": "True",
            "dataloader_prefetch_factor": "4",
        },
        ("copies", "pinned"): {"dataloader_pin_memory": "True"},
    },
    "accelerator": {
        ("dtype", "bfloat16"): {"mixed_precision": '"bf16"'},
        ("dtype", "float32"): {"mixed_precision": '"no"'},
    },
    **dict.fromkeys(LIGHTNING, _PRECISION),
}
"""Keyword arguments that make a change, by setting and value."""
