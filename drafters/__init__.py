"""Everything that proposes."""
