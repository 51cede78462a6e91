"""Parts of `stepscope.capture`: arguments, watched state, optimizers and the CUDA graphs."""
