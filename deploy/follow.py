"""Keeps the addresses of an API replica's targets up to date."""

import asyncio
import logging
from typing import Any

from ray.exceptions import RayError

from actors.gateway import LinkClient
from actors.processes import Directory

logger = logging.getLogger(__name__)

RETRY_S = 0.5


async def follow(client: LinkClient, supervisor: Any, known: Directory) -> None:
    """Passes every change of the targets' addresses to the client, until cancelled."""
    while True:
        try:
            known = await supervisor.directory.remote(known)
        except RayError as error:
            logger.warning("the supervisor does not answer, known targets stay in use: %s", error)
            await asyncio.sleep(RETRY_S)
        except Exception:
            # No caller awaits this task, and without it this replica would lose a target that moves.
            logger.exception("could not get the targets' addresses, known targets stay in use")
            await asyncio.sleep(RETRY_S)
        else:
            client.set_addresses(known.addresses)
