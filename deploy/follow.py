"""How a replica of the API keeps up with where the targets are."""

import asyncio
import logging
from typing import Any

from ray.exceptions import RayError

from actors.gateway import LinkClient
from actors.processes import Directory

logger = logging.getLogger(__name__)

ASK_AGAIN_S = 0.5


async def follow(client: LinkClient, supervisor: Any, known: Directory) -> None:
    """Keeps the client's addresses up to date, until it is cancelled."""
    while True:
        try:
            known = await supervisor.directory.remote(known)
        except RayError as error:
            logger.warning("the supervisor does not answer, the targets known serve on: %s", error)
            await asyncio.sleep(ASK_AGAIN_S)
        except Exception:
            # Owned here: nobody waits for this task, and without it a target that moves is lost to this replica.
            logger.exception("could not ask where the targets are, those known serve on")
            await asyncio.sleep(ASK_AGAIN_S)
        else:
            client.set_addresses(known.addresses)
