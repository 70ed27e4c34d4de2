"""Models, paged KV cache, attention, sampling, the round, and the targets."""

# At import, for whoever makes a product imports something of this package before, and one product is too late.
from engine.onednn import leave_out_broken_amx

leave_out_broken_amx()
