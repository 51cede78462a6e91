"""Communication and memory accounting of parallel training, with the derivation. No torch.

`CALCULATIONS[name].worked(batch=…, d_model=…)` answers the questions of a calculation.
"""

from stepscope.analysis.accounting import (
    buckets,
    data_parallel,
    fsdp,
    fsdp_tensor,
    pipeline,
    rings,
    sharded_state,
    tensor_parallel,
    xxl,
)
from stepscope.analysis.accounting.inputs import Inputs
from stepscope.analysis.accounting.sheet import Answer, Calculation, Given, Line, Worked

__all__ = ["CALCULATIONS", "Answer", "Calculation", "Given", "Inputs", "Line", "Worked"]

CALCULATIONS: dict[str, Calculation] = {
    one.name: one
    for one in (
        rings.COLLECTIVES,
        rings.ALTERNATE,
        data_parallel.CALCULATION,
        fsdp.CALCULATION,
        tensor_parallel.CALCULATION,
        fsdp_tensor.CALCULATION,
        pipeline.CALCULATION,
        buckets.CALCULATION,
        sharded_state.OPTIMIZER,
        sharded_state.FSDP,
        xxl.CALCULATION,
    )
}
