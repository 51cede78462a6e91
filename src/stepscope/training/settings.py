"""The settings of a training step: default, words and column of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from stepscope.kernels.activation_policy import ALL
from stepscope.model.checkpointing import NONE
from stepscope.report.blocks import Column


class Setting(NamedTuple):
    """One setting of a step, which is an attribute of that name."""

    default: object
    phrase: str
    """In the name of a step whose value is not the default."""
    column: Column | None = None
    """In tables of steps that differ in it."""
    shared: str = ""
    """For a value that all rows of a table have, if that is not the phrase."""
    of: Mapping[object, str] = {}
    """The same for certain values."""
    says_default: bool = False
    """Whether a table mentions the default where all rows have it."""

    def in_words(self, value: object) -> str:
        """Return words for a value that all rows of a table have; empty for most defaults."""
        if value in self.of:
            return self.of[value]
        if value == self.default and not self.says_default:
            return ""
        return (self.shared or self.phrase).format(value)


SETTINGS: dict[str, Setting] = {
    "size": Setting(None, "{}", Column(title="size")),
    "context": Setting(None, "{}", Column(title="context", kind="count")),
    "batch": Setting(4, "batch {}", Column(title="batch", kind="count"), says_default=True),
    "dtype": Setting(None, "{}", Column(title="dtype")),
    "attention": Setting(
        "reference", "{}", Column(title="attention"), "{} attention", says_default=True
    ),
    "compile": Setting("no", "compiled by {}", Column(title="compile"), of={"no": "eager"}),
    "optimizer": Setting(
        "torch",
        "adamw {}",
        Column(title="optimizer"),
        "Stepscope's AdamW",
        {
            "torch": "torch's AdamW",
            "torch-fused": "torch's fused AdamW",
            "stepscope-fused": "Stepscope's AdamW in one launch",
        },
    ),
    "compile_mode": Setting("default", "{}", Column(title="compile mode"), "compile mode {}"),
    "loss": Setting("plain", "{} loss", Column(title="loss"), "loss {}"),
    "fuses_loss": Setting(False, "fused loss"),
    "fused": Setting(False, "fused kernels", Column(title="fused kernels")),
    "fused_projections": Setting(
        False,
        "fused projections",
        Column(title="fused projections", hint="fused QKV and fused gate/up"),
    ),
    "autotune_gemms": Setting(
        False,
        "autotuned GEMMs",
        Column(title="autotuned GEMMs", hint="the fastest kernel of cuBLAS for each shape"),
    ),
    "activation_policy": Setting(
        ALL, "saves {}", Column(title="saves", hint="what a block saves for backward")
    ),
    "updates_in_backward": Setting(False, "optimizer-in-backward"),
    "graph": Setting(False, "as a graph", Column(title="graph"), "as a CUDA graph"),
    "checkpoint": Setting(
        NONE,
        "checkpointed: {}",
        Column(title="checkpoint", hint="blocks of a checkpointed segment"),
    ),
    "table": Setting("2025", "{}", Column(title="table"), "sizes of {}", says_default=True),
}
"""In the order of a table's columns."""


def unusual_settings(step: object, *names: str) -> list[str]:
    """Phrases for the settings of a step that differ from their defaults."""
    return [
        SETTINGS[name].phrase.format(value)
        for name in names
        if (value := getattr(step, name)) != SETTINGS[name].default
    ]
