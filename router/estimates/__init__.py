"""What is learned of drafters while serving: acceptance, draft and round times, goodput, drift."""
