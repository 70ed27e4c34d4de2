"""Profiles in a StateStore."""

import logging

from cluster.state import StateConflict, StateStore, StateUnavailable
from profiler.profile import PREFIX, Identity, Profile, ProfileRefused, read_profile

logger = logging.getLogger(__name__)

REFUSED_PREFIX = f"refused-{PREFIX}"
MAX_ATTEMPTS = 5


def usable_profile(store: StateStore, identity: Identity) -> Profile | None:
    """The stored profile; None if there is none. Logs why it cannot be used; a refused profile stays in the store."""
    try:
        document = store.get(identity.key)
        return None if document is None else read_profile(document.value, identity)
    except ProfileRefused as refused:
        logger.warning("the profile %r is not used: %s; `outrider profile` measures it again", identity.key, refused)
    except StateUnavailable as error:
        logger.warning("%s", error)
    return None


def save_profile(store: StateStore, profile: Profile) -> int:
    """Writes the profile over an older one, and returns its version. Raises as StateStore.put.

    Drafters and links that only the older one has are kept. A refused profile is moved to a key of its own.
    """
    key = profile.identity.key
    for _ in range(MAX_ATTEMPTS - 1):
        try:
            return _replace(store, key, profile)
        except StateConflict:
            continue  # another writer won: its profile is supplemented too
    return _replace(store, key, profile)


def _replace(store: StateStore, key: str, profile: Profile) -> int:
    document = store.get(key)
    if document is None:
        return store.put(key, profile.to_json(), expected_version=0)
    try:
        profile = profile.supplemented(read_profile(document.value, profile.identity))
    except ProfileRefused as refused:
        aside = f"{REFUSED_PREFIX}/{key.rsplit('/', 1)[-1]}/{document.version}"
        store.put(aside, document.value)
        logger.warning("profile %r is replaced (%s); it was kept as %r", key, refused, aside)
    return store.put(key, profile.to_json(), expected_version=document.version)
