"""Criteria of implementations that run on several ranks."""
