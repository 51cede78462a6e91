"""Somebody else's program with changes made from outside, in turns with itself as it is."""
