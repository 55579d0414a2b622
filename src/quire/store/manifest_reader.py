"""Reads a store's manifest without opening the store: no lock, no engine, no writer, no checker.

Threads: one. Raises the errors of opening a store for reading.
"""

from __future__ import annotations

import os
from typing import Self

from quire.durable import names
from quire.durable.files import OsDisk
from quire.manifest.env import ManifestEnv
from quire.manifest.migrations import refuse_newer
from quire.manifest.reads import ReadTxn
from quire.store import layout


class ManifestReader:
    """A manifest opened for reading, whether or not another process owns the store. A context manager."""

    def __init__(self, path: str) -> None:
        disk, self.path = OsDisk(), os.path.abspath(path)
        self._settings = layout.existing_config(disk, self.path)
        self._env = ManifestEnv(os.path.join(self.path, names.MANIFEST), self._settings.manifest, write=False)
        try:
            with ReadTxn(self._env) as txn:
                refuse_newer(txn._txn, self._env)
        except BaseException:
            self._env.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._env.close()

    def read(self) -> ReadTxn:
        """Begin a read transaction: a snapshot of the manifest."""
        return ReadTxn(self._env)
