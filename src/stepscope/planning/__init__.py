"""Memory of a training step, predicted before it runs."""
