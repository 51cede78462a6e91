"""Run cases in isolated worker processes and store each record when it is complete."""
