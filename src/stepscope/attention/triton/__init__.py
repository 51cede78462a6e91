"""FlashAttention-2 in Triton: kernels, their launch, and the memory they need."""
