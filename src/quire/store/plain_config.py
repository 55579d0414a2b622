"""A quire.toml that says no more than where the objects are, as `quire init` writes it: read without a TOML parser.

Loading one is a part of what a short command takes, and most stores change nothing else. Whatever this does not recognise,
right or wrong, is for the parser: so what is recognised here is exactly what that would say (a test compares).

Imports nothing, as the quick way in needs it. Pure function, any thread.

    >>> object_store_of('# a comment\\nobject_store = "s3://bucket"\\n[manifest]\\n# readers_max = 9\\n')
    's3://bucket'
    >>> object_store_of("[manifest]\\nreaders_max = 9\\n") is None
    True
"""

from __future__ import annotations

SECTIONS = (
    "manifest",
    "feed",
    "maintenance",
    "pages",
    "service",
    "manifest_log",
    "stream",
    "lsm",
    "objects",
    "namespaces",
)
"""What `quire.core.settings.StoreSettings` has beside the objects."""


def object_store_of(text: str) -> str | None:
    """What the text says of the objects, empty if nothing; `None` if it says more than that, or may be wrong."""
    url = ""
    seen: set[str] = set()
    for line in text.split("\n"):
        if not line.replace("\t", "").isprintable():
            return None
        stripped = line.strip(" \t")
        if not stripped or stripped.startswith("#"):
            continue
        name, equals, value = (part.strip(" \t") for part in stripped.partition("="))
        if name in seen:
            return None
        if not equals:
            if name[:1] + name[-1:] != "[]" or name[1:-1] not in SECTIONS:
                return None
        elif name != "object_store" or seen or not _is_simple(value):
            return None
        else:
            url = value[1:-1]
        seen.add(name)
    return url


def _is_simple(value: str) -> bool:
    """Whether it is a text in plain quotes, without anything that means something else."""
    return len(value) >= 2 and value[0] == value[-1] == '"' and not {'"', "\\"} & set(value[1:-1])
