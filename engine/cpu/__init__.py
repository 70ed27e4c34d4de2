"""The CPU fast path: one C file of small kernels, and the operators built on it and on oneDNN."""
