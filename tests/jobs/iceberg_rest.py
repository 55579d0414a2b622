"""The part of Iceberg's REST catalog that a mirror uses, on top of pyiceberg's SQL catalog."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import (
    CommitFailedException,
    NamespaceAlreadyExistsError,
    NoSuchNamespaceError,
    NoSuchTableError,
    TableAlreadyExistsError,
)
from pyiceberg.schema import Schema
from pyiceberg.table import CommitTableRequest, Table

STATUS_CODES: dict[type[Exception], int] = {
    NoSuchNamespaceError: 404,
    NoSuchTableError: 404,
    NamespaceAlreadyExistsError: 409,
    TableAlreadyExistsError: 409,
    CommitFailedException: 409,
}


@dataclass
class RestCatalogServer:
    """A catalog served over HTTP."""

    catalog: SqlCatalog
    url: str = ""
    lose_responses: int = 0
    """How many of the next commits are applied but answered with 504."""
    requests: list[str] = field(default_factory=list)

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
        """The status and document of a response."""
        self.requests.append(f"{method} {path}")
        parts = path.partition("?")[0].removeprefix("/v1/").split("/")
        if parts == ["config"]:
            return 200, {"defaults": {}, "overrides": {}}
        if parts == ["namespaces"]:
            name = tuple(json.loads(body)["namespace"])
            self.catalog.create_namespace(name)
            return 200, {"namespace": name, "properties": {}}
        namespace = parts[1]
        if len(parts) == 2:
            self.catalog.load_namespace_properties(namespace)
            return 204 if method == "HEAD" else 200, {"namespace": [namespace], "properties": {}}
        if len(parts) == 3:
            request = json.loads(body)
            schema = Schema.model_validate(request["schema"])
            created = self.catalog.create_table((namespace, request["name"]), schema, properties=request["properties"])
            return 200, _described(created)
        table = self.catalog.load_table((namespace, parts[3]))
        if method == "POST":
            commit = CommitTableRequest.model_validate_json(body)
            self.catalog.commit_table(table, commit.requirements, commit.updates)
            table = self.catalog.load_table((namespace, parts[3]))
            if self.lose_responses:
                self.lose_responses -= 1
                return 504, {"error": {"message": "the gateway gave up", "type": "GatewayTimeout", "code": 504}}
        return 200, _described(table)


def _described(table: Table) -> dict[str, Any]:
    metadata = json.loads(table.metadata.model_dump_json())
    return {"metadata-location": table.metadata_location, "metadata": metadata, "config": {}}


@contextmanager
def rest_catalog(root: Path) -> Iterator[RestCatalogServer]:
    """A catalog whose tables are below a directory."""
    (root / "lake").mkdir(exist_ok=True)
    catalog = SqlCatalog("rest", uri=f"sqlite:///{root}/rest.db", warehouse=f"file://{root}/lake")
    server = RestCatalogServer(catalog)
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            with lock:
                try:
                    status, document = server.answer(self.command, self.path, body)
                except tuple(STATUS_CODES) as error:
                    status = STATUS_CODES[type(error)]
                    document = {"error": {"message": str(error), "type": type(error).__name__, "code": status}}
            data = b"" if self.command == "HEAD" else json.dumps(document).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_HEAD = do  # noqa: N815 - http.server gives the names

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, name="iceberg-rest")
        thread.start()
        server.url = f"http://127.0.0.1:{http.server_port}"
        try:
            yield server
        finally:
            http.shutdown()
            thread.join()
