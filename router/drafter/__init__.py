"""Which drafter a request gets: policies, and the slot of the router."""
