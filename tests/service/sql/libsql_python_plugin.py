"""A pytest plugin for libsql-python's own suite: its in-memory databases become new databases of the server at
`QUIRE_URL`, and requests to the server that it expects at port 8080 go to that server."""

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
    """A connection to the server, or to a replica of it."""
    if "sync_url" in options:
        return _connect(f"{database}-{os.getpid()}", *args, **options | {"sync_url": URL})
    name = f"memory-{os.getpid()}-{next(_numbers)}"
    headers = {"authorization": f"Bearer {os.environ['QUIRE_TOKEN']}"}
    _urlopen(request.Request(f"{URL}/v1/namespaces/{name}/create", b"{}", headers, method="POST")).close()
    return _connect(f"{URL}/db/{name}", *args, auth_token="", **options)


def urlopen(address: Any, *args: Any, **options: Any) -> Any:
    """Redirects requests for the expected server."""
    return _urlopen(str(address).replace("http://localhost:8080", URL), *args, **options)


libsql.connect = connect
request.urlopen = urlopen  # type: ignore[assignment]  # any overload
