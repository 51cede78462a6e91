"""Grading of a user's own implementation of attention, RMSNorm, DDP, FSDP and sharded optimizers.

`check` has the cases and their view and loads without torch. `criteria` compares results of one
process with references, `ranks` those of several processes.
"""
