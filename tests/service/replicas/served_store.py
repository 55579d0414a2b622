"""A store served by another process, and replicas of its databases created by the real clients."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

import libsql
import turso.sync

from tests.programs import Program

ROOT = Path(__file__).parents[3]


class ServedStore:
    """The other process. After `kill`, `start` serves the same directory at the same address."""

    def __init__(self, directory: Path, address: str = "127.0.0.1:0", *more: str) -> None:
        """`more`: the URL of an archive, and a further argument to take over a restored store."""
        self.directory = directory
        self._address = address
        self._more = more
        self.start()

    def start(self) -> None:
        """Start the process."""
        command = ["-m", "tests.service.replicas.child", str(self.directory), self._address]
        self._process = Program(
            [*command, *self._more],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ},
        )
        hello = self.do("hello")
        self._address, self.token = hello["address"], hello["token"]

    @property
    def address(self) -> str:
        """Host and port."""
        return self._address

    def url(self, name: str = "shop") -> str:
        """The URL for replicas of a database."""
        return f"http://{self._address}/db/{name}"

    def do(self, command: str, *arguments: object) -> Any:
        """Have the process execute a command; returns its result."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([command, *arguments]) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        assert "error" not in answer, answer["error"]
        return answer["result"]

    def sql(self, *statements: str, name: str = "shop") -> list[Any]:
        """Run statements in one transaction; returns the rows of the last one."""
        rows: list[Any] = self.do("sql", name, *statements)
        return rows

    @property
    def is_alive(self) -> bool:
        """Whether the process is running."""
        return self._process.poll() is None

    def kill(self) -> None:
        """Kill the process with SIGKILL."""
        self._process.kill()
        self.wait()

    def arm(self, name: str, script: str) -> None:
        """Arm a failpoint: the process dies, or fails, there."""
        self.do("arm", name, script)

    def wait(self) -> int:
        """Wait until the process has ended; returns its exit status."""
        status = self._process.wait(60)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        return status

    def close(self) -> None:
        """Close the store and end the process."""
        if self._process.poll() is None and self._process.stdin is not None:
            self._process.stdin.close()
            self._process.stdin = None
        self.wait()


class LibsqlReplica:
    """An embedded replica of PyPI's `libsql`."""

    def __init__(self, served: ServedStore, path: Path, name: str = "shop") -> None:
        self.path = path
        self._served, self._name = served, name
        self.connect()

    def connect(self, name: str = "") -> None:
        """Open the replica, optionally of another database."""
        self._name = name or self._name
        url = self._served.url(self._name)
        self._connection = libsql.connect(str(self.path), sync_url=url, auth_token=self._served.token)

    def sync(self) -> None:
        """Fetch new changes."""
        self._connection.sync()

    def rows(self, statement: str) -> list[Any]:
        """The rows of a query that the replica answers from its local file."""
        return [list(row) for row in self._connection.execute(statement).fetchall()]

    def integrity(self) -> str:
        """The result of an integrity check of a copy of the file and its log: the server answers pragmas of the
        connection. Another process copies the files, because closing them here would release the connection's locks."""
        with tempfile.TemporaryDirectory() as directory:
            files = [str(self.path) + ending for ending in ("", "-wal") if Path(str(self.path) + ending).exists()]
            subprocess.run(["cp", *files, directory], check=True)
            with closing(sqlite3.connect(Path(directory) / self.path.name)) as connection:
                return str(connection.execute("PRAGMA integrity_check").fetchone()[0])

    def execute(self, statement: str) -> None:
        """Execute a write on the server."""
        self._connection.execute(statement)
        self._connection.commit()

    @property
    def position(self) -> tuple[int, int]:
        """(generation, frame)."""
        info = json.loads(Path(f"{self.path}-info").read_text())
        return info["generation"], info["durable_frame_num"]

    def close(self) -> None:
        self._connection.close()


class TursoReplica:
    """A replica of Turso's sync engine, by `pyturso`."""

    def __init__(self, served: ServedStore, path: Path, name: str = "shop", **options: Any) -> None:
        self.path = path
        self._served, self._name, self._options = served, name, options
        self.connect()

    def connect(self, name: str = "") -> None:
        """Open the replica, optionally of another database."""
        self._name = name or self._name
        url, token = self._served.url(self._name), self._served.token
        self._connection = turso.sync.connect(str(self.path), url, auth_token=token, **self._options)

    def sync(self) -> None:
        """Fetch new changes."""
        self._connection.pull()

    def rows(self, statement: str) -> list[Any]:
        """The rows of a query that the replica answers from its local file."""
        with closing(self._connection.cursor()) as cursor:
            return [list(row) for row in cursor.execute(statement).fetchall()]

    def integrity(self) -> str:
        """The result of the engine's integrity check."""
        return str(self.rows("PRAGMA integrity_check")[0][0])

    def execute(self, statement: str) -> None:
        """Execute a write in the replica."""
        self._connection.execute(statement)
        self._connection.commit()

    def push(self) -> None:
        """Send local writes to the server."""
        self._connection.push()

    @property
    def received_bytes(self) -> int:
        """Bytes received since the replica was opened."""
        received: int = self._connection.stats().network_received_bytes
        return received

    @property
    def revision(self) -> str:
        """The revision that the replica has recorded."""
        info = json.loads(Path(f"{self.path}-info").read_text())
        return str(info["synced_revision"]["revision"])

    def close(self) -> None:
        self._connection.close()
