"""`manage.py quire_branch what_if [--at monday]`: forks the project's database and prints the setting that uses the fork."""

from __future__ import annotations

import os
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import DEFAULT_DB_ALIAS, connections

from quire.core.errors import QuireError
from quire.django.base import DatabaseWrapper
from quire.django.creation import database_path
from quire.store.sqlite_urls import shared_store


class Command(BaseCommand):
    """Forks the database of an alias; nothing is copied."""

    help = "Create a branch of the database: an independent copy that takes no time and no space"

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the branch's name and its source."""
        parser.add_argument("name", help="the new database's name")
        parser.add_argument("--at", default=None, help="a snapshot's name; default: the version of NAME")
        parser.add_argument("--database", default=DEFAULT_DB_ALIAS, help="the alias in DATABASES")

    def handle(self, *_: Any, **options: Any) -> None:
        """Fork the database and print how to use it."""
        connection = connections[options["database"]]
        if not isinstance(connection, DatabaseWrapper) or connection.is_in_memory_db():
            raise CommandError(f"{options['database']!r} is not a database of a quire store")
        path = database_path(connection.settings_dict["NAME"])
        try:
            with shared_store(path.root) as store:
                store.fork(path.name, options["name"], at=options["at"] or path.at)
        except QuireError as error:
            raise CommandError(str(error)) from error
        self.stdout.write(f'"NAME": "{os.path.join(path.root, options["name"])}"')
