"""The composition root: command line, launch, API."""
