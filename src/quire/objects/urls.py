"""Schemes of object store URLs, checked without importing any backend.

Threads: any. Raises: `InvalidConfig`.
"""

from __future__ import annotations

import re

from quire.core.errors import InvalidConfig

REMOTE_SCHEMES = ("s3", "gs", "az", "memory")
ALLOWED = "a path, file:///path, s3://bucket/prefix, gs://bucket/prefix, az://container/prefix or memory://name"


def check_url(url: str) -> None:
    """Refuse an unsupported URL when the store is opened, rather than when the first object is put."""
    scheme = re.match(r"([A-Za-z][A-Za-z0-9+.-]+):(//)?", url)
    if scheme is None:
        return

    known = scheme[1].lower() in (*REMOTE_SCHEMES, "file")
    where = {} if "@" in url else {"url": url}  # the part before an '@' is probably a secret
    if known and not scheme[2]:
        raise InvalidConfig("the object store's URL lacks its //", hint=f"use {ALLOWED}", **where)
    if scheme[2] and not known:
        raise InvalidConfig(f"no object store has the scheme {scheme[1]!r}", hint=f"use {ALLOWED}", **where)
