"""Passes of the graph backend: each matches operators, rewrites them, and states what it did."""
