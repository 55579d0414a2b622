"""The base of requests, apart: what filters a list is a request too, and must load without streams."""

from __future__ import annotations

import msgspec


class Request(msgspec.Struct, frozen=True, array_like=True):
    """Base of all requests."""
