"""What a training step will need in memory, from its configuration alone. Loads without torch."""
