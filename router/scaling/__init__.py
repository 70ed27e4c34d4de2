"""How many replicas of the target and of each drafter there shall be."""
