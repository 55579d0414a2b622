"""Lookup of the installed version of a package, and how to install optional ones."""

from __future__ import annotations

import os
import sys
from functools import cache


@cache
def installed_version(package: str = "quire") -> str | None:
    """Return a package's version, from the name of its `.dist-info` directory; `None` if it is not installed.

    importlib is used only if no directory is found: it reads all metadata of a package, and takes longer than most commands.
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


def install_command(extra: str) -> str:
    """Return what to run to install the packages of an extra. quire is in no package index: it is installed from its source.

    >>> install_command("spark")
    "`pip install '.[spark]'` in the directory of quire's source"
    """
    return f"`pip install '.[{extra}]'` in the directory of quire's source"
