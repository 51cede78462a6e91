"""Linear layers with FP8 GEMMs: recipes, plain PyTorch reference, kernels. Loads without torch."""
