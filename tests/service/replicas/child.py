"""A process that owns a store, serves it over HTTP, and executes commands: lines of JSON on stdin. Tests kill it.

The clients of replicas hold the GIL while they wait for an answer, so a server in the same process would deadlock.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import quire
from quire.durable.failpoints import arm_from
from quire.service.replicas import frames
from quire.service.replicas.routes import ReplicaPart


class CommandHandler:
    """Executes commands, one method for each."""

    def __init__(self, directory: str, address: str, bucket: str = "", takeover: str = "") -> None:
        settings = quire.StoreSettings(maintenance=quire.MaintenanceSettings(delete_grace_seconds=0.0))
        if bucket:
            archive = quire.ArchiveSettings(mode="async", interval_seconds=0.02)
            settings = quire.StoreSettings(object_store=bucket, archive=archive)
        if takeover:
            self.store = quire.open(directory, takeover=True, discard=True)
        else:
            self.store = quire.open(directory, settings=settings)
        self.web = self.store.serve_http(address)
        self.connections: dict[str, Any] = {}
        self.marks = 0

    def hello(self) -> dict[str, str]:
        with open(f"{self.store.path}/admin.token") as file:
            return {"address": self.web.address.rpartition("/")[2], "token": file.read().strip()}

    def sql(self, name: str, *statements: str) -> list[Any]:
        """Run statements in one transaction; returns the rows of the last one."""
        connection = self._connection(name)
        rows: list[Any] = []
        with connection:
            for statement in statements:
                rows = [list(row) for row in connection.execute(statement)]
        return rows

    def run(self, name: str, kind: str) -> None:
        """Run a checkpoint or a merge, and the jobs that follow from it."""
        getattr(self.store, kind)(name)
        self.store.maintain()

    def create(self, name: str) -> None:
        self.store.create(name, "pages")

    def vacuum(self, name: str) -> None:
        self._connection(name).execute("VACUUM")

    def mark(self, name: str) -> None:
        """Create the snapshot that `rewind` restores."""
        self.marks += 1
        self.store.snapshot(name, f"mark-{self.marks}")

    def rewind(self, name: str) -> None:
        """Replace the database by its version at the last mark."""
        former = f"{name}-of-{self.store.database(name).db_id}"
        self._close(name)
        self.store.rename(name, former)
        self.store.fork(former, name, at=f"mark-{self.marks}")

    def replace_by_fork(self, name: str) -> None:
        """Replace the database by a fork of it with the same content."""
        self._close(name)
        former = f"{name}-of-{self.store.database(name).db_id}"
        self.store.rename(name, former)
        self.store.fork(former, name)

    def _connection(self, name: str) -> Any:
        if name not in self.connections:  # `rewind` has closed it
            self.connections[name] = self.store.sqlite(name, create=True)
        return self.connections[name]

    def _close(self, name: str) -> None:
        connection = self.connections.pop(name, None)
        if connection is not None:
            connection.close()

    def fork(self, name: str, new_name: str) -> None:
        self.store.fork(name, new_name)

    def drop(self, name: str) -> None:
        self._close(name)
        self.store.drop(name)

    def archive(self) -> None:
        """Wait until everything is in the bucket."""
        assert self.store.archive is not None
        self.store.archive.wait(60)

    def release_versions(self) -> None:
        """Release the versions that are held for replicas, as the server does after a minute."""
        for part in self.web._web.parts:
            if isinstance(part, ReplicaPart):
                part._held.close()

    def cut_frames_at(self, frames_max: int) -> None:
        frames.FRAMES_MAX = frames_max

    def arm(self, name: str, script: str) -> None:
        arm_from(f"{name}={script}")

    def chains(self, name: str) -> list[int]:
        """The length of each slot's chain."""
        db_id = self.store.database(name).db_id
        with self.store.manifest.read() as txn:
            return [len(txn.chain(db_id, slot)) for slot in range(4)]


def main(directory: str, address: str, *more: str) -> None:
    """Execute commands until stdin is closed."""
    handler = CommandHandler(directory, address, *more)
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        try:
            answer: dict[str, Any] = {"result": getattr(handler, command)(*arguments)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)
    handler.store.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
