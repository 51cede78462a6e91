"""Observation of all steps of a program, on every rank (`stepscope.Observer`)."""
