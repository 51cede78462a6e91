"""FlashAttention-2 in Triton: kernels, their launch, and loads and stores of tiles."""
