"""A manifest log and an object store that can be made unavailable, for tests of upload, bundles and followers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quire.core.errors import ObjectStoreUnavailable
from quire.core.settings import ManifestLogSettings
from quire.objects.open import open_store
from quire.stream.mlog_log import ManifestLog
from quire.stream.mlog_tier2 import LogObjects
from quire.testing.clock import ManualClock
from tests.stream.logs import STREAM, append_all, files_at
from tests.stream.random_history import RandomHistory

FEW = ManifestLogSettings(chunk_bytes=16 << 10, record_bytes_max=1024, snapshot_chunks=4)


class FlakyStore:
    """An object store that fails while it is `down`, or once `fail_after` calls have succeeded."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.down = False
        self.fail_after: int | None = None
        self.puts: list[str] = []
        self.deletes: list[str] = []

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        if not callable(value) or name == "close":
            return value

        def call(*args: Any, **kwargs: Any) -> Any:
            if self.fail_after is not None:
                self.fail_after -= 1
            if self.down or (self.fail_after is not None and self.fail_after < 0):
                raise ObjectStoreUnavailable("the object store is down", hint="wait")
            if name == "put":
                self.puts.append(args[0])
            if name == "delete":
                self.deletes.append(args[0])
            return value(*args, **kwargs)

        return call


class LogHarness:
    """The manifest log of one stream, with its files and its objects."""

    def __init__(self, root: Path, settings: ManifestLogSettings = FEW) -> None:
        self.root = root
        self.settings = settings
        self.clock = ManualClock()
        self.store = FlakyStore(open_store(str(root / "objects")))
        self.objects = LogObjects(self.store, STREAM)
        self.files = files_at(root / "store")
        self.history = RandomHistory(11)
        self.log = self.open()

    def open(self) -> ManifestLog:
        return ManifestLog.open(
            self.files, clock=self.clock, settings=self.settings, objects=self.objects, collect=self.store.delete_many
        )

    def reopen(self) -> ManifestLog:
        self.log.close()
        self.log = self.open()
        return self.log

    def append_records(self, count: int) -> None:
        """Append legal records and commit them."""
        append_all(self.log, self.history.many(count))

    def chunks(self, count: int, records: int = 5) -> None:
        """Append records and seal them as `count` chunks."""
        for _ in range(count):
            self.append_records(records)
            self.log.rotate()

    def close(self) -> None:
        self.log.close()
        self.store.close()
