"""The CUDA path: Triton kernels, and graphs of small decode passes. Imported by the factory alone."""
