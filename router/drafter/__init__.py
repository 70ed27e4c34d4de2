"""Which drafter a request gets: policies, matching, and the slot of the router."""
