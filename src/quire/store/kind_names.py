"""The names of kinds of databases, as users write them.

The kinds are named after their engines (`pages`, `stream`, `lsm`); a user who knows what they store may say `sqlite` or
`key-value` instead. Raises `InvalidInput`.
"""

from __future__ import annotations

from quire.core.errors import InvalidInput
from quire.manifest.records import DbKind

NAMES = {
    "pages": DbKind.PAGES,
    "sqlite": DbKind.PAGES,
    "stream": DbKind.STREAM,
    "lsm": DbKind.LSM,
    "kv": DbKind.LSM,
    "key-value": DbKind.LSM,
}


def kind_named(name: DbKind | str) -> DbKind:
    """Return the kind of database with this name; a kind names itself.

    >>> kind_named("key-value") is kind_named("lsm")
    True
    """
    if isinstance(name, DbKind):
        return name
    if name not in NAMES:
        hint = "one of: pages (or sqlite), stream, lsm (or kv, key-value)"
        raise InvalidInput("unknown kind of database", hint=hint, name=name)
    return NAMES[name]
