"""DSpark: a parallel block drafter on the target's own hidden states, with a light sequential head."""
