"""Recording of the training steps of a running program (`stepscope.Scope`)."""
