"""Tenants of the memory of devices, and whether they fit."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from cluster.errors import InvalidField

GB = 2**30


class Stay(StrEnum):
    """When a drafter is in memory."""

    START = "start"  # from the start on; gives way when others are wanted more
    LAZY = "lazy"  # once it is wanted
    PINNED = "pinned"  # from the start on, never evicted


@dataclass(frozen=True, slots=True)
class Tenant:
    """A drafter as its devices see it. ``reload_s``: estimated seconds of a reload."""

    name: str
    device: str
    num_bytes: int
    stay: Stay = Stay.START
    fallback: str | None = None  # where it goes when its device has no room
    fallback_bytes: int = 0
    reload_s: float = 1.0

    def bytes_on(self, device: str) -> int:
        return self.num_bytes if device == self.device else self.fallback_bytes


def check_fits(tenants: Iterable[Tenant], limits: Mapping[str, int]) -> None:
    """Raises InvalidField, with figures: a tenant is larger than any device it may be on, or the pinned are together."""
    pinned: dict[str, list[Tenant]] = {}
    for tenant in tenants:
        limit = limits.get(tenant.device)
        falls = tenant.fallback is not None and tenant.fallback_bytes <= limits.get(tenant.fallback, tenant.fallback_bytes)
        if limit is not None and tenant.num_bytes > limit and not falls:
            raise InvalidField(
                "drafters",
                tenant.name,
                f"takes {tenant.num_bytes / GB:.2f} GB, more than the {limit / GB:.2f} GB for drafters on {tenant.device}: "
                "lower its kv_cache_gb, or raise the limit in the section memory",
            )
        if tenant.stay is Stay.PINNED:
            pinned.setdefault(tenant.device, []).append(tenant)
    for device, together in pinned.items():
        num_bytes = sum(tenant.num_bytes for tenant in together)
        if num_bytes > limits.get(device, num_bytes):
            each = ", ".join(f"{tenant.name} {tenant.num_bytes / GB:.2f}" for tenant in together)
            raise InvalidField(
                "drafters",
                [tenant.name for tenant in together],
                f"are pinned, and take {num_bytes / GB:.2f} GB together ({each}), more than the "
                f"{limits[device] / GB:.2f} GB for drafters on {device}: pin fewer, or raise it in the section memory",
            )
