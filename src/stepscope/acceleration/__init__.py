"""Optimizations of a user's model, applied from outside without changing its code."""
