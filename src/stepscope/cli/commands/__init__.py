"""One module per command of `stepscope`."""
