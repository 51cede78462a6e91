"""The page of an observed training program, and the config of its record."""
