"""Prediction of a training step's memory from its configuration alone. Loads without torch."""
