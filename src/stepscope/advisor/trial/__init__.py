"""Changes applied at run time to a user's program, interleaved with its unchanged run."""
