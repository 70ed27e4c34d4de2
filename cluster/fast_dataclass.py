"""Dataclasses that are frozen for the type checker and cheap to construct: a round makes hundreds."""

from dataclasses import dataclass
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def record(cls: type[T]) -> type[T]:
    """As ``dataclass(frozen=True, slots=True)``, with a third of its construction time."""
    return dataclass(slots=True, unsafe_hash=True)(cls)
