"""Traces of all ranks of a job: breakdown per rank, clocks aligned by collectives, stragglers."""
