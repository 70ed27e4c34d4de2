"""Bounded polling for changes in other processes, and a process that can start no more threads."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

DEADLINE_S = 180.0  # as a server has to start: machines may be slow, and busy with others' work


def eventually(truth: Callable[[], bool], deadline_s: float = DEADLINE_S) -> None:
    end_s = time.monotonic() + deadline_s
    while not truth():
        assert time.monotonic() < end_s, f"did not become true within {deadline_s:g} s"
        time.sleep(0.05)


@contextmanager
def no_more_threads() -> Iterator[None]:
    """As where the system's limit is reached: a stack of this size finds no room."""
    before = threading.stack_size(2**46)
    try:
        yield
    finally:
        threading.stack_size(before)


def gauge(http: httpx.Client, name: str, member: str | None = None) -> float:
    """A figure of /metrics, summed over its members or of one. It may be a second old.

    While the cluster does not answer the API its figures are absent, and are asked for again."""
    samples: list[Sample] = []

    def answers() -> bool:
        if not (page := http.get("/metrics")).is_success:
            return False
        families = text_string_to_metric_families(page.text)
        samples[:] = [sample for family in families for sample in family.samples]
        return any(sample.name == "outrider_cluster_up" and sample.value for sample in samples)

    eventually(answers)
    return sum(s.value for s in samples if s.name == name and (member is None or member in s.labels.values()))
