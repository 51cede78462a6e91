"""The training step of several ranks: its cases, its subject, its timing."""
