"""A cache by request whose entries expire: the router is not notified when requests end."""

from typing import Generic, TypeVar

T = TypeVar("T")

# A target whose report is late for a few slots must not cost its requests what was learned of them.
GENERATION_SLOTS = 32


class ExpiringCache(Generic[T]):
    """A mapping that drops entries unused for one to two generations of slots; its size is bounded by the live requests."""

    def __init__(self) -> None:
        self._young: dict[str, T] = {}
        self._old: dict[str, T] = {}
        self._slot = 0

    def next_slot(self) -> None:
        self._slot += 1
        if self._slot % GENERATION_SLOTS == 0:
            self._old, self._young = self._young, {}

    def get(self, request_id: str) -> T | None:
        value = self._young.get(request_id)
        if value is None:
            value = self._old.get(request_id)
            if value is not None:
                self._young[request_id] = value
        return value

    def put(self, request_id: str, value: T) -> None:
        self._young[request_id] = value

    def __len__(self) -> int:
        return len(self._young.keys() | self._old.keys())
