"""Rules that predict which changes of a training step are worth making, from its ledgers."""
