"""One file a paper: its rules over shapes of `router/assignment.py` and `router/plan.py`, chosen by name in the file."""
