"""Tenants for tests of the API."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.support.api import serving
from tests.support.scripted import ScriptedClient


def auth(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@asynccontextmanager
async def limited(
    tmp_path: Path, script: Any = None, **limits: float
) -> AsyncIterator[tuple[httpx.AsyncClient, ScriptedClient]]:
    """Tenant "limited" of key sk-one, and "free" of sk-free."""
    path = tmp_path / "keys"
    fields = "".join(f"    {name}: {value}\n" for name, value in limits.items())
    path.write_text(
        f"tenants:\n  - name: limited\n    keys: [sk-one, sk-two]\n{fields}  - name: free\n    keys: [sk-free]\n"
    )
    async with serving(script, api_keys_file=path, keys_refresh_s=0.0) as (http, cluster):
        yield http, cluster
