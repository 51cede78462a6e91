"""Helpers for torch and Triton that every package may use."""
