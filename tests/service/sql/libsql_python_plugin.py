"""A plugin of pytest for libsql-python's own suite: what it opens in memory is a new database of the server at `QUIRE_URL`,
and the server that it expects at port 8080 is that one."""

from __future__ import annotations

import itertools
import os
from typing import Any
from urllib import request

import libsql

URL = os.environ["QUIRE_URL"]
_numbers = itertools.count()
_connect, _urlopen = libsql.connect, request.urlopen


def connect(database: str, *args: Any, **options: Any) -> Any:
    """A connection to a server, or to a replica of one."""
    if "sync_url" in options:
        return _connect(f"{database}-{os.getpid()}", *args, **options | {"sync_url": URL})
    name = f"memory-{os.getpid()}-{next(_numbers)}"
    headers = {"authorization": f"Bearer {os.environ['QUIRE_TOKEN']}"}
    _urlopen(request.Request(f"{URL}/v1/namespaces/{name}/create", b"{}", headers, method="POST")).close()
    return _connect(f"{URL}/db/{name}", *args, auth_token="", **options)


def urlopen(address: Any, *args: Any, **options: Any) -> Any:
    """What is asked of the expected server."""
    return _urlopen(str(address).replace("http://localhost:8080", URL), *args, **options)


libsql.connect = connect
request.urlopen = urlopen  # type: ignore[assignment]  # any of its forms
