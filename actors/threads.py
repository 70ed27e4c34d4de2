"""How many threads the matrix products of a process get."""

import os


def set_threads(num_threads: int | str) -> None:
    """Must come before torch is imported: OpenMP reads its variables when it is loaded.

    OpenMP's threads spin at barriers by default. On a machine shared with drafters, gateway and proxy that steals the time
    that those need, so they are told to sleep soon.
    """
    os.environ["OMP_NUM_THREADS"] = str(num_threads)
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
