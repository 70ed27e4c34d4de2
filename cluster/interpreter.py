"""Settings of the interpreter in processes that serve until they end."""

import gc
import sys

SWITCH_S = 0.0005  # Python's default is 5 ms


def freeze_startup_objects() -> None:
    """Freezes the present objects, so that gc skips them. A process with torch has 200,000, and a full collection over them
    stops every loop for a tenth of a second. Called once, when everything is loaded."""
    gc.collect()
    gc.freeze()


def switch_threads_quickly() -> None:
    """A thread that computes in Python lets others run after SWITCH_S. The threads of gRPC that carry commits and proposals
    wait for it (docs/measurements/README.md)."""
    sys.setswitchinterval(SWITCH_S)
