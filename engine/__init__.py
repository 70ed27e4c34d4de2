"""Models, paged KV cache, attention, sampling, the round, and the targets."""

from engine.onednn import leave_out_broken_amx

leave_out_broken_amx()
