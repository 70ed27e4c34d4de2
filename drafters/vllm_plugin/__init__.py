"""Lookups of the pool inside an unchanged vLLM server, which verifies their drafts by its own rule. No Ray, no torch.

    vllm serve MODEL --speculative-config \
        '{"method": "custom_class", "model": "drafters.vllm_plugin.PoolProposer", "num_speculative_tokens": 8}'
"""

from drafters.vllm_plugin.proposer import PoolProposer

__all__ = ["PoolProposer"]
