"""Reading of profiler traces, attribution of kernels to operators, and time ledgers."""
