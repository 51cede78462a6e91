"""How close to the limit can one training step get, and what does each change bring?

    stepscope run step --size small --context 512       # ladder, loss curves, waterfall
    stepscope run step --part race --race 2.7b-2048     # against torch.compile, in turns

Four parts. `ladder`: from the plainest step (eager, float32, attention written out) each change
alone and on top of those before it. `loss`: the same rungs trained on a text that can be learnt,
held against the float32 curve. `waterfall`: the first and the fastest step traced, from the ideal
time of their operations up to the measured time, by cause. `race`: ours against the fastest of
torch.compile's forms, in turns on the same weights; then each on its own for its energy.

On one H200, estimated by what a case costs: the ladder of small 1.5 minutes, of 2.7b at context
2048 2 minutes; the loss curves 7 minutes; the waterfalls 2 minutes; a race 2 to 4 minutes with
`--scopes block --modes default`, a minute more for each form that is compiled whole, several for
each with `--modes max-autotune`. What torch.compile made is found again in its caches by the next
command on the same machine.
"""

from stepscope.studies.step.cases import STUDY as STUDY
