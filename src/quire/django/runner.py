"""A test runner that gives each test class a fork of the migrated test database.

`TEST_RUNNER = "quire.django.runner.ForkingRunner"`. Migrations run once. A class that leaves rows behind, or changes the
schema, does so in its own fork, which is dropped with it. A fork copies nothing: it takes the same time whatever the size.
"""

from __future__ import annotations

from typing import Any

from django.db import connections
from django.test import SimpleTestCase
from django.test.runner import DiscoverRunner
from django.test.utils import iter_test_cases

from quire.django.base import DatabaseWrapper
from quire.django.creation import drop, fork


class ForkingRunner(DiscoverRunner):
    """Django's own runner, with a fork for each class that uses a quire database."""

    def build_suite(self, *arguments: Any, **options: Any) -> Any:
        """Return the tests, with classes that fork before their setup."""
        suite = super().build_suite(*arguments, **options)
        for kind in {type(test) for test in iter_test_cases(suite)}:
            if issubclass(kind, SimpleTestCase) and kind.databases:
                _fork_before(kind)
        return suite


def _fork_before(kind: type[SimpleTestCase]) -> None:
    set_up: Any = kind.setUpClass

    def set_up_class(cls: type[SimpleTestCase]) -> None:
        if cls is kind:  # not in a call from the setup of a subclass, which has its own fork
            for alias in connections:
                connection = connections[alias]
                if isinstance(connection, DatabaseWrapper) and not connection.is_in_memory_db():
                    name = connection.settings_dict["NAME"]
                    _go(connection, f"{name}_{cls.__qualname__}")
                    # Only now: if there is no fork, the cleanup would drop the database of all classes.
                    cls.addClassCleanup(_back, connection, name)
        set_up.__func__(cls)

    kind.setUpClass = classmethod(set_up_class)


def _go(connection: DatabaseWrapper, name: str) -> None:
    connection.close()
    fork(connection.settings_dict["NAME"], name)
    connection.settings_dict["NAME"] = name


def _back(connection: DatabaseWrapper, name: str) -> None:
    connection.close()
    drop(connection.settings_dict["NAME"])
    connection.settings_dict["NAME"] = name
