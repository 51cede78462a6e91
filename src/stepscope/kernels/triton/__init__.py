"""Triton kernels; the module of the same name one level up has the naive version and the public
function."""
