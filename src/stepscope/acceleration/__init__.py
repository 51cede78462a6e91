"""Faster forms of the parts of a model that is not ours, applied from outside."""
