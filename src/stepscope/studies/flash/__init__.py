"""How fast and how exact is each attention, and which kernel is it?

    stepscope run flash                       # the whole study: for a GPU
    stepscope run flash --part race           # the implementations against each other
    stepscope run flash --part grid --attention sdpa tiled --seq 128 256 --head 64 --device cpu

Three parts. `grid`: one case for each implementation, format, length and head dimension, with
forward, backward and both in one record. `race`: every implementation on the same tensors in
turns, because a GPU under its power limit lowers its clock and only times taken in turns compare.
`tiles`: our kernels with every tile, to see what the chosen one is worth.

On one H200 the whole study is estimated at 16 minutes, by what a case costs: the grid's 420 cells
that are called as they are, 5 minutes; its 80 cells that torch compiles first, 6 minutes; 100 tiles
at 2 s, 3.5 minutes; 16 races, 1.5 minutes. `--attention triton sdpa_cudnn` leaves out most of it.
"""

from stepscope.studies.flash.cases import STUDY as STUDY
