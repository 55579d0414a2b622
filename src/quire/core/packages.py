"""Which version of a package is installed."""

from __future__ import annotations

import os
import sys
from functools import cache


@cache
def installed_version(package: str = "quire") -> str | None:
    """A package's version, from the name of the directory that was made when it was installed; `None` if it is not there.

    Only who finds none asks importlib: that reads everything a package says of itself, and takes longer than most commands.
    """
    for place in filter(os.path.isdir, sys.path):
        for name in os.listdir(place):
            if name.startswith(f"{package}-") and name.endswith(".dist-info"):
                return name[len(package) + 1 :].removesuffix(".dist-info")
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None
