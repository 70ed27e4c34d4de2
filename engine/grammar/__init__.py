"""Structured output: grammars compiled by xgrammar, the masks of draft rows, forced tokens, and ends within max_tokens."""
