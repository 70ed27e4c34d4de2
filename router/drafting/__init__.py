"""How far to draft, how much to verify, and when: rules, prices and overlap."""
