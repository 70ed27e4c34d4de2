"""Tensor parallelism of the native target: every rank holds a shard of the weights and of the KV cache."""
