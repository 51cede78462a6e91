"""Observation of the lines of the user's code in some steps of the program."""
