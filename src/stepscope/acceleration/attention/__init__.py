"""Replacement of naive attention in a user's model by one fused kernel, at run time."""
