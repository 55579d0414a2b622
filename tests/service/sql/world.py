"""A store whose SQL is served over HTTP, and clients that speak Hrana by hand."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import quire
from quire.durable.failpoints import VARIABLE
from quire.store.store import Store
from tests.programs import Program
from tests.service.web.world import Asker, Told

SERVICE: dict[str, Any] = {"http_anonymous_writes": True, "stop_seconds": 1.0}


def settings(**service: Any) -> quire.StoreSettings:
    return quire.StoreSettings(
        maintenance=quire.MaintenanceSettings(enabled=False), service=quire.ServiceSettings(**SERVICE | service)
    )


def value(plain: Any) -> dict[str, Any]:
    """A value as clients send it."""
    match plain:
        case None:
            return {"type": "null"}
        case int():
            return {"type": "integer", "value": str(plain)}
        case float():
            return {"type": "float", "value": plain}
        case _:
            return {"type": "text", "value": plain}


def statement(sql: str, *args: Any) -> dict[str, Any]:
    return {"sql": sql, "args": [value(arg) for arg in args]}


def execute(sql: str, *args: Any) -> dict[str, Any]:
    return {"type": "execute", "stmt": statement(sql, *args)}


CLOSE = {"type": "close"}


@dataclass
class SqlAsker:
    """Speaks Hrana over HTTP; keeps the baton of its stream."""

    address: str
    version: str = "v3"
    headers: dict[str, str] = field(default_factory=dict)
    prefix: str = ""
    baton: str | None = None

    def post(self, path: str, body: Any, **headers: str) -> Told:
        return Asker(self.address).post(self.prefix + path, body, **self.headers, **headers)

    def pipeline(self, *requests: dict[str, Any], **headers: str) -> list[dict[str, Any]]:
        told = self.post(f"/{self.version}/pipeline", {"baton": self.baton, "requests": requests}, **headers)
        assert told.status == 200, told.body
        self.baton = told.json["baton"]
        results: list[dict[str, Any]] = told.json["results"]
        return results

    def once(self, sql: str, *args: Any, **headers: str) -> dict[str, Any]:
        """One statement on a stream of its own."""
        told = self.post("/v2/pipeline", {"requests": [execute(sql, *args), CLOSE]}, **headers)
        assert told.status == 200, told.body
        result: dict[str, Any] = told.json["results"][0]
        return result

    def rows(self, sql: str, *args: Any) -> list[tuple[Any, ...]]:
        result = self.once(sql, *args)
        assert result["type"] == "ok", result
        return plain_rows(result["response"]["result"]["rows"])

    def run(self, sql: str, *args: Any) -> dict[str, Any]:
        """A statement on this stream; its response."""
        (result,) = self.pipeline(execute(sql, *args))
        assert result["type"] == "ok", result
        response: dict[str, Any] = result["response"]
        return response

    def lines(self, *steps: dict[str, Any]) -> list[dict[str, Any]]:
        told = self.post("/v3/cursor", {"baton": self.baton, "batch": {"steps": steps}})
        assert told.status == 200, told.body
        lines = [json.loads(line) for line in told.body.splitlines()]
        self.baton = lines[0]["baton"]
        return lines[1:]


def plain(sent: dict[str, Any]) -> Any:
    return int(sent["value"]) if sent["type"] == "integer" else sent.get("value", sent.get("base64"))


def plain_rows(rows: list[list[dict[str, Any]]]) -> list[tuple[Any, ...]]:
    return [tuple(plain(cell) for cell in row) for row in rows]


@contextmanager
def sql_served(path: Path, **service: Any) -> Iterator[tuple[Store, SqlAsker]]:
    with quire.open(path, settings=settings(**service)) as store, store.serve_http("127.0.0.1:0") as server:
        yield store, SqlAsker(server.address)


OWNER = """
import sys, quire

settings = quire.StoreSettings(
    maintenance=quire.MaintenanceSettings(enabled=False),
    service=quire.ServiceSettings(http_anonymous_writes=True, stop_seconds=1.0),
)
with quire.open(sys.argv[1], settings=settings) as store, store.serve_http("127.0.0.1:0") as server:
    print(server.address, flush=True)
    sys.stdin.read()
"""


@contextmanager
def owner(path: Path, failpoints: str = "") -> Iterator[SqlAsker]:
    """The store, served by a process of its own, which may be killed; it has ended behind the block."""
    with Program(
        ["-c", OWNER, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, VARIABLE: failpoints},
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield SqlAsker(process.stdout.readline().strip())
        process.stdin.close()
        process.wait(120)
