"""The summary of a trace as tables, figures and findings."""
