"""The Triton kernels; the module of the same name above has the naive form and the public call."""
