"""Which database a request means (W4): the header `x-namespace`, else the first label of its host, else the prefix `/db/NAME`
of its path, else the default one.

A label of the host counts where the rest of the name is one by which the server is reached (`service.http_hosts`), or
`localhost`: `shop.localhost:7448` is the database `shop`. An address has no labels.

Pure.
"""

from __future__ import annotations

from collections.abc import Collection
from urllib.parse import unquote

from quire.core.errors import InvalidInput

NAME_CHARACTERS_MAX = 300
HEADER = "x-namespace"


def database_name(
    *, header: str | None, host: str, path_name: str | None, hosts: Collection[str] = (), default: str = ""
) -> str:
    """The name, with its version if it has one.

    >>> database_name(header=None, host="shop.localhost:7448", path_name=None)
    'shop'
    >>> database_name(header="crm", host="shop.localhost", path_name=None)
    'crm'
    >>> database_name(header=None, host="127.0.0.1:7448", path_name="shop%40monday", default="main")
    'shop@monday'
    >>> database_name(header=None, host="data.lan", path_name=None, hosts=["data.lan"], default="main")
    'main'
    """
    name = header or label_of(host, hosts) or (unquote(path_name) if path_name else "") or default
    if not name:
        hint = f"send the header {HEADER}, or use the path /db/NAME"
        raise InvalidInput("the request names no database, and the server has no default", hint=hint)
    if len(name) > NAME_CHARACTERS_MAX:
        raise InvalidInput("the name of the database is too long", characters=len(name))
    return name


def label_of(host: str, hosts: Collection[str]) -> str:
    """The database that a host names; "" if it names none."""
    plain = host.rpartition(":")[0] if ":" in host and not host.endswith("]") else host
    label, dot, rest = plain.lower().partition(".")
    return label if dot and (rest == "localhost" or rest in hosts) else ""
