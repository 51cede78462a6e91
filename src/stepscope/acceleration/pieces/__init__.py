"""Parts of a training step that have a faster form, each with a `find`."""
