"""Garbage collection in processes that serve until they end."""

import gc


def freeze_startup_objects() -> None:
    """Freezes the present objects, so that gc skips them. A process with torch has 200,000, and a full collection over them
    stops every loop for a tenth of a second. Called once, when everything is loaded."""
    gc.collect()
    gc.freeze()
