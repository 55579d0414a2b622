"""Integrations with other tools: SQLAlchemy, aiosqlite, pytest, Datasette, sqlite-utils, fsspec. The tools find them by entry
points; programs import `aio`."""

from typing import TYPE_CHECKING

from quire.core.lazy import lazy_names

if TYPE_CHECKING:
    from quire.integrations import aio as aio

__all__ = ["aio"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, {"aio": "quire.integrations.aio"})
