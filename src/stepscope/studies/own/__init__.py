"""The own study: speed and memory of a user's model, and the effect of each setting.

    stepscope run own --model lab.net:build --batch 8 32 --dtype float32 bfloat16

`build` is a function without arguments. It returns an `nn.Module` and a function that creates a
batch: `make_batch(size, device)` returns the arguments of the model, as a dictionary for keyword
arguments or a tuple for positional arguments. The model returns the loss: a scalar, an object with
a `loss` attribute, or `(loss, …)`. For other outputs `build` also returns `loss(output, batch)`.
"""

from __future__ import annotations

from collections.abc import Sequence

from stepscope.errors import UsageError
from stepscope.model.config import precision
from stepscope.records.schema import Record
from stepscope.report.blocks import Table
from stepscope.studies.base import Study
from stepscope.studies.own.cases import STUDY_NAME, OwnCase, OwnFlags


class Own(Study[OwnFlags, OwnCase]):
    name = STUDY_NAME
    title = "Your own model"
    question = (
        "How fast does this model train with each setting, what limits it,"
        " and where do its time and memory go?"
    )
    examples = (
        "stepscope run own --model lab.net:build --batch 8 32",
        "stepscope run own --model lab.net:build --dtype float32 tf32 bfloat16",
        "stepscope run own --model lab.net:build --compile no model --optimizer adamw adamw-fused",
    )
    flags = OwnFlags
    case = OwnCase
    fresh_process = True

    def cases(self, flags: OwnFlags) -> tuple[OwnCase, ...]:
        if not flags.model:
            raise UsageError("no model was given", "use --model package.module:function")
        swept = [n for n in OwnCase.__struct_fields__ if isinstance(getattr(flags, n), tuple)]
        dtypes = [precision(dtype).name for dtype in flags.dtype]
        return (*OwnCase.combinations(flags, *swept, dtype=dtypes),)

    def headline(self, records: Sequence[Record]) -> Table | None:
        from stepscope.studies.own.view import settings_table

        return settings_table(self.results(records)) if records else None


STUDY = Own()
