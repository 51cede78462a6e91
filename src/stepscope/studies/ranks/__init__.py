"""Studies that need several ranks: their cases, subjects and results."""
