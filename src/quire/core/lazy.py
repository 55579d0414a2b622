"""Public names of a package whose modules are loaded on first use (PEP 562).

A package's `__init__.py` runs before any of its modules, so it imports nothing: an executor that needs one module does not pay
for the rest, nor does a program that only prints its help.

Threads: any.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from sys import modules
from typing import Any


def lazy_names(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for `package`; `homes` maps each public name to the module that defines it.

    A home that ends in the name itself (`dbapi` in `quire.sqlite.dbapi`) is a public module.
    """

    def getattribute(name: str) -> Any:
        home = homes.get(name)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = import_module(home)
        value = module if home == f"{package}.{name}" else getattr(module, name)
        setattr(modules[package], name, value)  # so that this function runs once per name
        return value

    def directory() -> list[str]:
        return sorted({*vars(modules[package]), *homes})

    return getattribute, directory
