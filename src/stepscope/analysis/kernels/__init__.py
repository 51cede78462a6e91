"""Classifies kernels and operators by their names."""
