"""The CPU fast path: C kernels, and the operators built on them and on oneDNN."""
