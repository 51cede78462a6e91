"""Replay of one device's backward for more ranks than are available. Pure: no torch, no group."""
