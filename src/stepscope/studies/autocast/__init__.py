"""Actual dtypes of all tensors under autocast.

    stepscope run autocast

Nothing is assumed: one forward and backward pass runs, and the dispatcher records what each
operator reads and writes. The subjects are the small network of the course and the model under
study.
"""

from __future__ import annotations

from stepscope.studies.autocast.cases import AutocastCase, AutocastFlags
from stepscope.studies.base import Study


class Autocast(Study[AutocastFlags, AutocastCase]):
    name = "autocast"
    title = "Autocast"
    question = (
        "Which dtype do parameters, activations, logits, loss and gradients have under autocast,"
        " which operators stay in float32, and what do the casts cost?"
    )
    examples = (
        "stepscope run autocast",
        "stepscope run autocast --subject small --dtype bfloat16 --attention sdpa",
    )
    flags = AutocastFlags
    case = AutocastCase
    no_model = "it describes each layer of its own models"

    def cases(self, flags: AutocastFlags) -> tuple[AutocastCase, ...]:
        return (*AutocastCase.combinations(flags, "subject", "dtype"),)


STUDY = Autocast()
