"""Classification of kernels and operators by their names."""
