"""Datasette plugin: the databases of a store, and their snapshots, are databases in Datasette.

    plugins:
      quire:
        store: /data/store         # or a list of them
        databases: "shop*"         # default: all
        snapshots: true            # default
        write: false               # default

Datasette finds it by an entry point. Nothing of quire is loaded unless a store is configured.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from datasette import hookimpl

from quire.core.lazy import lazy_names

if TYPE_CHECKING:
    from quire.integrations.datasette_databases import StoreDatabases

_load, _ = lazy_names(__name__, {"StoreDatabases": "quire.integrations.datasette_databases"})
_served: dict[int, StoreDatabases] = {}
"""By the identity of the Datasette that shows them, which lives as long as the process."""


@hookimpl
def startup(datasette: Any) -> Callable[[], Awaitable[None]] | None:
    """Add the databases of the configured stores."""
    config = datasette.plugin_config("quire")
    if not config:
        return None
    databases = _served[id(datasette)] = _load("StoreDatabases")(datasette, config)
    return databases.refresh


@hookimpl
def asgi_wrapper(datasette: Any) -> Callable[[Any], Any]:
    """Before each request, add and remove databases and snapshots that were created or dropped since the last one."""

    def wrap(app: Any) -> Any:
        async def refreshed(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] == "http" and (databases := _served.get(id(datasette))) is not None:
                await databases.refresh()
            await app(scope, receive, send)

        return refreshed

    return wrap
