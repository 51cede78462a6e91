"""Replay of one device's backward pass for more ranks than are available. Needs neither torch nor a
process group."""
