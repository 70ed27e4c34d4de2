"""Dataclasses that are frozen to the type checker, and cheap to make: a round makes hundreds."""

from dataclasses import dataclass
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def record(cls: type[T]) -> type[T]:
    """As ``dataclass(frozen=True, slots=True)``, which takes three times as long to make an instance."""
    return dataclass(slots=True, unsafe_hash=True)(cls)
