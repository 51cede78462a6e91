"""Stepscope: where a training step's time and memory go, and what to change."""

__version__ = "0.1.0"
