"""Record of an observed training program, and its page."""
