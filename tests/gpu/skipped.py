"""What the runner knows of a check that cannot run here. Imports nothing, as the runner sets Triton's environment first."""


class Skipped(Exception):
    """The message says what the check lacks."""
