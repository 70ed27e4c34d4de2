"""Studies of the papers, simulated."""
