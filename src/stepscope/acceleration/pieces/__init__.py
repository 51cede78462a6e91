"""Pieces of a foreign model that `accelerate` replaces, one kind per module."""
