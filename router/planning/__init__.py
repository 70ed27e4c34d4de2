"""What a pass takes: prompts, objectives, admission and fairness."""
