"""The CUDA path: Triton kernels, and CUDA graphs of small decode passes. Only the factory imports it."""
