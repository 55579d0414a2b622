"""A store that serves SQL over HTTP, and a minimal Hrana client."""

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
from tests.service.web.http_client import HttpClient, Response

SERVICE: dict[str, Any] = {"http_anonymous_writes": True, "stop_seconds": 1.0}


def settings(**service: Any) -> quire.StoreSettings:
    return quire.StoreSettings(
        maintenance=quire.MaintenanceSettings(enabled=False), service=quire.ServiceSettings(**SERVICE | service)
    )


def value(python_value: Any) -> dict[str, Any]:
    """A value in Hrana's JSON encoding."""
    match python_value:
        case None:
            return {"type": "null"}
        case int():
            return {"type": "integer", "value": str(python_value)}
        case float():
            return {"type": "float", "value": python_value}
        case _:
            return {"type": "text", "value": python_value}


def statement(sql: str, *args: Any) -> dict[str, Any]:
    return {"sql": sql, "args": [value(arg) for arg in args]}


def execute(sql: str, *args: Any) -> dict[str, Any]:
    return {"type": "execute", "stmt": statement(sql, *args)}


CLOSE = {"type": "close"}


@dataclass
class HranaClient:
    """A Hrana client over HTTP that keeps the baton of its stream."""

    address: str
    version: str = "v3"
    headers: dict[str, str] = field(default_factory=dict)
    prefix: str = ""
    baton: str | None = None

    def post(self, path: str, body: Any, **headers: str) -> Response:
        return HttpClient(self.address).post(self.prefix + path, body, **self.headers, **headers)

    def pipeline(self, *requests: dict[str, Any], **headers: str) -> list[dict[str, Any]]:
        response = self.post(f"/{self.version}/pipeline", {"baton": self.baton, "requests": requests}, **headers)
        assert response.status == 200, response.body
        self.baton = response.json["baton"]
        results: list[dict[str, Any]] = response.json["results"]
        return results

    def once(self, sql: str, *args: Any, **headers: str) -> dict[str, Any]:
        """Run one statement on a stream of its own; returns its result."""
        response = self.post("/v2/pipeline", {"requests": [execute(sql, *args), CLOSE]}, **headers)
        assert response.status == 200, response.body
        result: dict[str, Any] = response.json["results"][0]
        return result

    def rows(self, sql: str, *args: Any) -> list[tuple[Any, ...]]:
        result = self.once(sql, *args)
        assert result["type"] == "ok", result
        return plain_rows(result["response"]["result"]["rows"])

    def run(self, sql: str, *args: Any) -> dict[str, Any]:
        """Run a statement on this stream; returns its response."""
        (result,) = self.pipeline(execute(sql, *args))
        assert result["type"] == "ok", result
        response: dict[str, Any] = result["response"]
        return response

    def lines(self, *steps: dict[str, Any]) -> list[dict[str, Any]]:
        response = self.post("/v3/cursor", {"baton": self.baton, "batch": {"steps": steps}})
        assert response.status == 200, response.body
        lines = [json.loads(line) for line in response.body.splitlines()]
        self.baton = lines[0]["baton"]
        return lines[1:]


def plain_value(sent: dict[str, Any]) -> Any:
    return int(sent["value"]) if sent["type"] == "integer" else sent.get("value", sent.get("base64"))


def plain_rows(rows: list[list[dict[str, Any]]]) -> list[tuple[Any, ...]]:
    return [tuple(plain_value(cell) for cell in row) for row in rows]


@contextmanager
def sql_served(path: Path, **service: Any) -> Iterator[tuple[Store, HranaClient]]:
    with quire.open(path, settings=settings(**service)) as store, store.serve_http("127.0.0.1:0") as server:
        yield store, HranaClient(server.address)


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
def owner(path: Path, failpoints: str = "") -> Iterator[HranaClient]:
    """Serve the store from a separate process, which can be killed. It has ended when the block ends."""
    with Program(
        ["-c", OWNER, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, VARIABLE: failpoints},
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield HranaClient(process.stdout.readline().strip())
        process.stdin.close()
        process.wait(120)
