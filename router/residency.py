"""Which drafters are in memory, and on which device: loading, eviction and CPU fallback.

Pure: demand and time in, moves out. A *tenant* is a replica of a drafter. An absent drafter costs only speed.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
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


DECAY = 0.8  # of a tenant's usage at each update: about the last five count
HYSTERESIS = 2.0  # demand for a tenant over the usage of those that make room for it
MAX_RETIRING = 40  # updates until a tenant that does not become idle stays
MAX_OFFERED = 10  # updates until a tenant without room is no longer offered for a while


@dataclass(frozen=True, slots=True)
class LoadDemand:
    """Demand for a tenant: ``num_requests`` are with it, ``num_wanting`` would be if it were in memory."""

    num_requests: int = 0
    num_wanting: int = 0


@dataclass(frozen=True, slots=True)
class Moves:
    """In this order. A retiring tenant gets no new requests and is evicted by a later update, once idle."""

    evict: tuple[str, ...] = ()
    load: tuple[tuple[str, str], ...] = ()  # (tenant, device)

    def __bool__(self) -> bool:
        return bool(self.evict or self.load)


@dataclass(slots=True)
class _TenantState:
    tenant: Tenant
    device: str | None = None  # where it is resident or being loaded
    since_s: float = 0.0
    usage: float = 0.0  # decayed number of its requests
    demand: float = 0.0  # decayed number of requests assigned to it while absent
    num_requests: int = 0  # with it at the last update
    num_retiring: int | None = None  # updates since it retires; None: it does not
    num_offered: int = 0
    closed_until_s: float = 0.0  # not to be loaded before

    @property
    def worth(self) -> float:
        return self.usage * self.tenant.reload_s


class ModelPool:
    """Decides which tenants are resident. A tenant stays for at least ``min_residence_s``, which bounds the rate of swaps.
    One with requests, or a pinned one, is never evicted. ``limits``: bytes by device; a device without one holds anything.

    Raises InvalidField: the pinned tenants do not fit; says how much memory is missing.
    """

    def __init__(self, tenants: Sequence[Tenant], limits: Mapping[str, int], min_residence_s: float) -> None:
        check_fits(tenants, limits)
        self.tenants = tenants
        self.num_loads = {tenant.name: 0 for tenant in tenants}
        self.num_evictions = dict(self.num_loads)
        self.num_fallbacks = dict(self.num_loads)
        self._limits = dict(limits)
        self._min_residence_s = min_residence_s
        self._states = {tenant.name: _TenantState(tenant) for tenant in tenants}
        self._claims: dict[str, str] = {}  # device -> the tenant for which others retire there

    # ---- state

    @property
    def resident(self) -> dict[str, str]:
        """Device of each tenant that is, or is being, loaded."""
        return {name: state.device for name, state in self._states.items() if state.device is not None}

    @property
    def is_settled(self) -> bool:
        """Whether every tenant is in place and no demand would change that."""
        return not self.on_fallback and len(self.resident) == len(self._states)

    @property
    def retiring(self) -> frozenset[str]:
        return frozenset(name for name, state in self._states.items() if state.num_retiring is not None)

    @property
    def on_fallback(self) -> frozenset[str]:
        return frozenset(name for name, device in self.resident.items() if device != self._states[name].tenant.device)

    def bytes_of(self, name: str) -> int:
        """Its memory where it is resident, else 0."""
        state = self._states[name]
        return 0 if state.device is None else state.tenant.bytes_on(state.device)

    def offered(self, now_s: float) -> frozenset[str]:
        """Absent tenants that could be loaded: there is room, or others could make room."""
        return frozenset(
            state.tenant.name
            for state in self._absent(now_s)
            if self._device_with_room(state) is not None or self._evictable_for(state, now_s)
        )

    def _absent(self, now_s: float) -> list[_TenantState]:
        return [state for state in self._states.values() if state.device is None and now_s >= state.closed_until_s]

    def _residents(self, device: str) -> list[_TenantState]:
        return [state for state in self._states.values() if state.device == device]

    # ---- decisions

    def start(self, now_s: float) -> Moves:
        """Loads pinned tenants, then the others in the order of the file, while there is room."""
        tenants = [
            state for stay in (Stay.PINNED, Stay.START) for state in self._states.values() if state.tenant.stay is stay
        ]
        load = (self._load(state, device, now_s) for state in tenants if (device := self._device_with_room(state)))
        return Moves(load=tuple(load))

    def update(self, demands: Mapping[str, LoadDemand], now_s: float) -> Moves:
        """Moves for ``demands``; a tenant missing there has none."""
        for name, state in self._states.items():
            self._add_demand(state, demands.get(name, LoadDemand()), now_s)
        self._drop_claims({state.tenant.name for state in self._wanted(now_s)} | (self.on_fallback & self.retiring))
        idle = [state for state in self._states.values() if state.num_retiring is not None and state.num_requests == 0]
        for state in idle:
            self._evict(state)
        wanted = self._wanted(now_s)
        load = tuple(self._load(state, device, now_s) for state in wanted if (device := self._device_for(state, now_s)))
        self._retire_from_fallback(now_s)
        return Moves(tuple(state.tenant.name for state in idle), load)

    def failed(self, name: str, until_s: float) -> None:
        """Its load failed or it ended: frees its place until ``until_s``."""
        self._leave(self._states[name])
        self._close(self._states[name], until_s)

    def check_integrity(self) -> None:
        """Raises AssertionError if a limit is exceeded, or an absent tenant retires."""
        for device, limit in self._limits.items():
            taken = sum(state.tenant.bytes_on(device) for state in self._residents(device))
            assert taken <= limit, f"{device} holds {taken} bytes, its limit is {limit}"
        for name, state in self._states.items():
            assert state.device in (None, state.tenant.device, state.tenant.fallback), f"{name} is on {state.device}"
            assert state.num_retiring is None or state.device is not None, f"{name} is absent and retires"

    # ---- one tenant

    def _add_demand(self, state: _TenantState, demand: LoadDemand, now_s: float) -> None:
        is_here = state.device is not None
        state.num_requests = demand.num_requests
        state.usage = DECAY * state.usage + (demand.num_requests if is_here else 0)
        state.demand = 0.0 if is_here else DECAY * state.demand + demand.num_wanting
        if state.num_retiring is not None:
            state.num_retiring += 1
            if state.num_retiring > MAX_RETIRING:
                state.num_retiring, state.since_s = None, now_s
        is_offered = not is_here and demand.num_wanting > 0 and now_s >= state.closed_until_s
        state.num_offered = state.num_offered + 1 if is_offered else 0
        if state.num_offered > MAX_OFFERED and state.tenant.name not in self._claims.values():
            self._close(state, now_s + self._min_residence_s)

    @staticmethod
    def _close(state: _TenantState, until_s: float) -> None:
        state.num_offered, state.demand, state.closed_until_s = 0, 0.0, until_s

    def _wanted(self, now_s: float) -> list[_TenantState]:
        """Tenants to load if possible, in order of demand."""
        return sorted((state for state in self._absent(now_s) if state.demand >= 1.0), key=lambda state: -state.demand)

    def _device_for(self, state: _TenantState, now_s: float) -> str | None:
        """The device to load it on now; retires others that must make room first."""
        own, name = state.tenant.device, state.tenant.name
        claimant, free = self._claims.get(own), self._device_with_room(state)
        if claimant in (None, name) and free == own:
            return own
        if claimant == name:
            if all(one.num_retiring is None for one in self._residents(own)):  # they were never idle
                del self._claims[own]
                self._close(state, now_s + self._min_residence_s)
            return None
        if claimant is None:
            evictable = self._evictable_for(state, now_s)
            if evictable and state.demand > HYSTERESIS * sum(one.usage for one in evictable):
                self._claims[own] = name
                for one in evictable:
                    one.num_retiring = 0
                return None
        return free if free != own else None

    def _has_room(self, device: str, num_bytes: int, without: Collection[str] = ()) -> bool:
        held = sum(one.tenant.bytes_on(device) for one in self._residents(device) if one.tenant.name not in without)
        return device not in self._limits or held + num_bytes <= self._limits[device]

    def _device_with_room(self, state: _TenantState) -> str | None:
        """Its own device, else its fallback, if there is room."""
        devices = (state.tenant.device, state.tenant.fallback)
        return next((one for one in devices if one is not None and self._has_room(one, state.tenant.bytes_on(one))), None)

    def _evictable_for(self, state: _TenantState, now_s: float) -> list[_TenantState]:
        """The least valuable evictable tenants of its device that together make room; empty if they cannot."""
        device, found = state.tenant.device, []
        for one in sorted(self._residents(device), key=lambda one: (one.worth, one.since_s)):
            is_new = now_s - one.since_s < self._min_residence_s
            if is_new or one.tenant.stay is Stay.PINNED or one.num_retiring is not None:
                continue
            found.append(one)
            if self._has_room(device, state.tenant.num_bytes, [other.tenant.name for other in found]):
                return found
        return []

    def _retire_from_fallback(self, now_s: float) -> None:
        """Retires a tenant from its fallback when its own device has room."""
        for name in sorted(self.on_fallback - self.retiring):
            state = self._states[name]
            own, is_old = state.tenant.device, now_s - state.since_s >= self._min_residence_s
            if is_old and own not in self._claims and self._has_room(own, state.tenant.num_bytes):
                state.num_retiring = 0
                self._claims[own] = name
                return

    def _drop_claims(self, wanted: set[str]) -> None:
        """Cancels pending loads without demand; tenants that retired for them stay."""
        for device, name in list(self._claims.items()):
            if name not in wanted:
                del self._claims[device]
                for one in self._residents(device):
                    if one.tenant.name not in self._claims.values():
                        one.num_retiring = None

    def _load(self, state: _TenantState, device: str, now_s: float) -> tuple[str, str]:
        tenant = state.tenant
        assert self._has_room(device, tenant.bytes_on(device)), f"{device} has no room for {tenant.name}"
        if self._claims.get(device) == tenant.name:
            del self._claims[device]
        state.device, state.since_s, state.num_offered = device, now_s, 0
        state.usage, state.demand, state.num_retiring = state.demand, 0.0, None
        self.num_loads[tenant.name] += 1
        self.num_fallbacks[tenant.name] += device != tenant.device
        return tenant.name, device

    def _evict(self, state: _TenantState) -> None:
        was_on_fallback = state.device != state.tenant.device
        demand = max(state.usage, 1.0) if was_on_fallback else 0.0
        self._leave(state)
        state.demand = demand
        self.num_evictions[state.tenant.name] += 1

    @staticmethod
    def _leave(state: _TenantState) -> None:
        state.device = state.num_retiring = None
        state.usage = 0.0
