"""Models, paged KV cache, attention, sampling, the round, and the targets."""
