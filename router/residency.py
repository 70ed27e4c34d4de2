"""Which drafters are in memory, and on which device: loading, eviction and CPU fallback.

Pure: demand and time in, moves out. A *tenant* is a replica of a drafter; a *look* is one evaluation of the demand. An
absent drafter costs only speed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from router.devices import DeviceManager, Stay, Tenant, check_fits

DECAY = 0.8  # of a tenant's use at each look: about the last five count
HYSTERESIS = 2.0  # demand for a tenant over the use of those that make room for it
MAX_RETIRING = 40  # looks until a tenant that does not become idle stays
MAX_OFFERED = 10  # looks until a tenant without room is no longer offered for a while


@dataclass(frozen=True, slots=True)
class LoadDemand:
    """Demand for a tenant at a look: ``num_requests`` are with it, ``num_wanting`` would be if it were in memory."""

    num_requests: int = 0
    num_wanting: int = 0


@dataclass(frozen=True, slots=True)
class Moves:
    """In this order. A retiring tenant gets no new requests and is evicted at a later look, once idle."""

    evict: tuple[str, ...] = ()
    load: tuple[tuple[str, str], ...] = ()  # (tenant, device)

    def __bool__(self) -> bool:
        return bool(self.evict or self.load)


@dataclass(slots=True)
class _TenantState:
    tenant: Tenant
    device: str | None = None  # where it is resident or being loaded
    since_s: float = 0.0
    use: float = 0.0  # decayed number of its requests
    want: float = 0.0  # decayed number of requests assigned to it while absent
    num_requests: int = 0  # with it at the last look
    num_retiring: int | None = None  # looks since it retires; None: it does not
    num_offered: int = 0
    closed_until_s: float = 0.0  # not to be loaded before

    @property
    def worth(self) -> float:
        return self.use * self.tenant.reload_s


class ModelPool:
    """Decides which tenants are resident. A tenant stays for at least ``min_residence_s``, which bounds the rate of swaps.
    One with requests, or a pinned one, is never evicted.

    Raises InvalidField: the pinned tenants do not fit; says how much memory is missing.
    """

    def __init__(self, tenants: Sequence[Tenant], limits: Mapping[str, int], min_residence_s: float) -> None:
        check_fits(tenants, limits)
        self.tenants = tenants
        self.devices = DeviceManager(limits)
        self.num_loads = {tenant.name: 0 for tenant in tenants}
        self.num_evictions = dict(self.num_loads)
        self.num_fallbacks = dict(self.num_loads)
        self._min_residence_s = min_residence_s
        self._known = {tenant.name: _TenantState(tenant) for tenant in tenants}
        self._claims: dict[str, str] = {}  # device -> the tenant for which others retire there

    # ---- state

    @property
    def resident(self) -> dict[str, str]:
        """Device of each tenant that is, or is being, loaded."""
        return {name: known.device for name, known in self._known.items() if known.device is not None}

    @property
    def is_settled(self) -> bool:
        """Whether every tenant is in place and no demand would change that."""
        return not self.on_fallback and len(self.resident) == len(self._known)

    @property
    def retiring(self) -> frozenset[str]:
        return frozenset(name for name, known in self._known.items() if known.num_retiring is not None)

    @property
    def on_fallback(self) -> frozenset[str]:
        return frozenset(name for name, device in self.resident.items() if device != self._known[name].tenant.device)

    def bytes_of(self, name: str) -> int:
        """Its memory where it is resident, else 0."""
        known = self._known[name]
        return 0 if known.device is None else known.tenant.bytes_on(known.device)

    def offered(self, now_s: float) -> frozenset[str]:
        """Absent tenants that could be loaded: there is room, or others could make room."""
        return frozenset(
            name
            for name, known in self._known.items()
            if known.device is None
            and now_s >= known.closed_until_s
            and (self._room_for(known) is not None or self._elders(known, now_s))
        )

    # ---- decisions

    def start(self, now_s: float) -> Moves:
        """Loads pinned tenants, then the others in the order of the file, while there is room."""
        first = [known for known in self._known.values() if known.tenant.stay is Stay.PINNED]
        then = [known for known in self._known.values() if known.tenant.stay is Stay.START]
        return Moves(
            load=tuple(self._load(known, room, now_s) for known in (*first, *then) if (room := self._room_for(known)))
        )

    def look(self, demands: Mapping[str, LoadDemand], now_s: float) -> Moves:
        """Moves for ``demands``; a tenant missing there has none."""
        for name, known in self._known.items():
            self._see(known, demands.get(name, LoadDemand()), now_s)
        self._drop_claims({known.tenant.name for known in self._wanted(now_s)} | (self.on_fallback & self.retiring))
        evict = tuple(name for name, known in self._known.items() if self._may_go(known))
        for name in evict:
            self._evict(self._known[name])
        wanted = self._wanted(now_s)
        load = tuple(self._load(known, room, now_s) for known in wanted if (room := self._place(known, now_s)))
        self._go_home(now_s)
        return Moves(evict, load)

    def failed(self, name: str, until_s: float) -> None:
        """Its load failed or it ended: frees its place until ``until_s``."""
        known = self._known[name]
        if known.device is not None:
            self._leave(known)
        known.want, known.closed_until_s = 0.0, until_s

    def check_integrity(self) -> None:
        """Raises AssertionError if the pool and its devices disagree, or a limit is exceeded."""
        self.devices.check_integrity()
        for name, known in self._known.items():
            holders = [device for device in {known.tenant.device, known.tenant.fallback} if device is not None]
            held = [device for device in holders if name in self.devices.tenants(device)]
            assert held == ([] if known.device is None else [known.device]), f"{name} is at {known.device}, held by {held}"
            assert known.num_retiring is None or known.device is not None, f"{name} retires from nowhere"

    # ---- one tenant

    def _see(self, known: _TenantState, demand: LoadDemand, now_s: float) -> None:
        here = known.device is not None
        known.num_requests = demand.num_requests
        known.use = DECAY * known.use + (demand.num_requests if here else 0)
        known.want = 0.0 if here else DECAY * known.want + demand.num_wanting
        if known.num_retiring is not None:
            known.num_retiring += 1
            if known.num_retiring > MAX_RETIRING:
                known.num_retiring, known.since_s = None, now_s
        asked = not here and demand.num_wanting > 0 and now_s >= known.closed_until_s
        known.num_offered = known.num_offered + 1 if asked else 0
        if known.num_offered > MAX_OFFERED and known.tenant.name not in self._claims.values():
            known.num_offered, known.want, known.closed_until_s = 0, 0.0, now_s + self._min_residence_s

    def _wanted(self, now_s: float) -> list[_TenantState]:
        """Tenants to load if possible, in order of demand."""
        absent = [known for known in self._known.values() if known.device is None and now_s >= known.closed_until_s]
        return sorted((known for known in absent if known.want >= 1.0), key=lambda known: -known.want)

    @staticmethod
    def _may_go(known: _TenantState) -> bool:
        """Whether it retires and is idle."""
        return known.num_retiring is not None and known.num_requests == 0

    def _place(self, known: _TenantState, now_s: float) -> str | None:
        """The device to load it on now; retires others that must make room first."""
        own, name = known.tenant.device, known.tenant.name
        claimant = self._claims.get(own)
        if claimant in (None, name) and self._room_for(known) == own:
            return own
        if claimant == name:
            if any(self._known[one].num_retiring is not None for one in self.devices.tenants(own)):
                return None  # until those have retired
            del self._claims[own]  # they were never idle
            known.want, known.closed_until_s = 0.0, now_s + self._min_residence_s
            return None
        if claimant is None:
            giving_way = self._giving_way(known, now_s)
            if giving_way:
                self._claims[own] = name
                for one in giving_way:
                    one.num_retiring = 0
                return None
        room = self._room_for(known)
        return room if room != own else None

    def _room_for(self, known: _TenantState) -> str | None:
        """Its own device, else its fallback, if there is room."""
        tenant = known.tenant
        if self.devices.has_room(tenant.device, tenant.num_bytes):
            return tenant.device
        if tenant.fallback is not None and self.devices.has_room(tenant.fallback, tenant.fallback_bytes):
            return tenant.fallback
        return None

    def _elders(self, known: _TenantState, now_s: float) -> list[_TenantState]:
        """The least valuable evictable tenants of its device that together make room; empty if they cannot."""
        device, found = known.tenant.device, []
        here = [self._known[name] for name in self.devices.tenants(device)]
        for one in sorted(here, key=lambda k: k.worth):
            young = now_s - one.since_s < self._min_residence_s
            if young or one.tenant.stay is Stay.PINNED or one.num_retiring is not None:
                continue
            found.append(one)
            if self.devices.has_room(device, known.tenant.num_bytes, [k.tenant.name for k in found]):
                return found
        return []

    def _giving_way(self, known: _TenantState, now_s: float) -> list[_TenantState]:
        elders = self._elders(known, now_s)
        return elders if known.want > HYSTERESIS * sum(one.use for one in elders) else []

    def _go_home(self, now_s: float) -> None:
        """Retires a tenant from its fallback when its own device has room."""
        for name in sorted(self.on_fallback - self.retiring):
            known = self._known[name]
            home, settled = known.tenant.device, now_s - known.since_s >= self._min_residence_s
            if settled and home not in self._claims and self.devices.has_room(home, known.tenant.num_bytes):
                known.num_retiring = 0
                self._claims[home] = name
                return

    def _drop_claims(self, wanted: set[str]) -> None:
        """Cancels pending loads without demand; tenants that retired for them stay."""
        for device, name in list(self._claims.items()):
            if name not in wanted:
                del self._claims[device]
                for one in self.devices.tenants(device):
                    if one not in self._claims.values():
                        self._known[one].num_retiring = None

    def _load(self, known: _TenantState, device: str, now_s: float) -> tuple[str, str]:
        tenant = known.tenant
        self.devices.take(tenant.name, device, tenant.bytes_on(device))
        if self._claims.get(device) == tenant.name:
            del self._claims[device]
        known.device, known.since_s, known.num_offered = device, now_s, 0
        known.use, known.want, known.num_retiring = known.want, 0.0, None
        self.num_loads[tenant.name] += 1
        self.num_fallbacks[tenant.name] += device != tenant.device
        return tenant.name, device

    def _evict(self, known: _TenantState) -> None:
        goes_home = known.device != known.tenant.device
        use = known.use
        self._leave(known)
        known.want = max(use, 1.0) if goes_home else 0.0
        self.num_evictions[known.tenant.name] += 1

    def _leave(self, known: _TenantState) -> None:
        assert known.device is not None
        self.devices.free(known.tenant.name, known.device)
        known.device = known.num_retiring = None
        known.use = 0.0
