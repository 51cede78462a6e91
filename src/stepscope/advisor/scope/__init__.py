"""A training step of someone else's program, watched while it runs (`stepscope.Scope`)."""
