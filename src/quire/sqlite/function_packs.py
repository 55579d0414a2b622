"""SQL functions that an installed Python package provides, by name: `django` has those that Django's queries use.

A pack is an entry point of the group `quire.sql_functions`: a function that takes a PEP 249 connection and defines the
functions on it. So a server can define what its clients' queries need without receiving code from them.

Threads: any.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from importlib.metadata import entry_points

import apsw

from quire.sqlite.pep249.connection import Connection, wrap

GROUP = "quire.sql_functions"
Pack = Callable[[Connection], None]


def define_functions(connection: apsw.Connection, name: str) -> bool:
    """Define the functions of a pack on a connection; return False if the pack or a package it needs is not installed."""
    pack = _pack(name)
    if pack is not None:
        pack(wrap(connection))
    return pack is not None


@lru_cache
def _pack(name: str) -> Pack | None:
    for entry in entry_points(group=GROUP, name=name):
        try:
            pack: Pack = entry.load()
        except ImportError:  # needs an extra that is not installed
            continue
        return pack
    return None
