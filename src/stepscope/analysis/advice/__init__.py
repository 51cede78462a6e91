"""Which change of a training step is worth making: predicted from its ledgers, pure and tested."""
