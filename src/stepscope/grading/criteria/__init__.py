"""Criteria of implementations that run in one process."""
