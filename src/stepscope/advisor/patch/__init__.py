"""Verified changes written into the user's own source code, as a patch."""
