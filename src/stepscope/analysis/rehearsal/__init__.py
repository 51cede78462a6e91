"""One device's backward, replayed for ranks that one does not have. Pure: no torch, no group."""
