"""Lines of the user's code: what they launch, what they cost, and what to write instead."""
