"""Runs cases in isolated worker processes and stores each record when it is complete."""
