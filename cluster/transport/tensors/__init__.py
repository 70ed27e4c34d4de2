"""Links that carry tensors beside control links, from a target to a drafter on another device."""
