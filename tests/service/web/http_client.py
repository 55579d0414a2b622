"""A store that is served over HTTP, and a minimal HTTP client."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import quire
from quire.manifest.records import ChunkRecord, DeltaRecord, JobKind, Residency, VerifyState
from quire.service.web.server import WebServer
from quire.store.store import Store
from tests.manifest.checkpoints import DeltaChunk, FullChunk, WalChunkUpdate, append_wal_chunk, checkpoint_apply
from tests.service.owners import settings

JSON = "application/json"


@dataclass
class Response:
    """A response."""

    status: int
    headers: dict[str, str]
    body: bytes = field(repr=False)

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class HttpClient:
    """A client of one server. A `token` that is not empty is sent with every request."""

    address: str
    token: str = ""

    @property
    def host_and_port(self) -> tuple[str, int]:
        parts = urlsplit(self.address)
        return parts.hostname or "", parts.port or 0

    def request(self, method: str, path: str, body: bytes | None = None, /, **headers: str) -> Response:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        if self.token:
            sent.setdefault("Authorization", f"Bearer {self.token}")
        connection = http.client.HTTPConnection(*self.host_and_port, timeout=60)
        try:
            connection.request(method, path, body, sent)
            answer = connection.getresponse()
            return Response(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> Response:
        return self.request("GET", path, **headers)

    def post(self, path: str, value: Any = None, **headers: str) -> Response:
        return self.request("POST", path, json.dumps(value or {}).encode(), **{"Content_Type": JSON, **headers})

    def raw(self, data: bytes) -> bytes:
        """The bytes that the server sends in reply to `data`, until it disconnects or is silent."""
        with socket.create_connection(self.host_and_port, timeout=60) as connection:
            connection.sendall(data)
            received = b""
            try:
                while piece := connection.recv(65_536):
                    received += piece
            except (TimeoutError, ConnectionResetError):
                pass
            return received


def admin_client(web: WebServer, store: Store) -> HttpClient:
    """A client with the admin token."""
    return HttpClient(web.address, (Path(store.path) / "admin.token").read_text().strip())


@contextmanager
def web_served(path: Path, address: str = "127.0.0.1:0", **service: Any) -> Iterator[tuple[Store, WebServer]]:
    """A store and its HTTP server."""
    with quire.open(path, settings=settings(**service)) as store, store.serve_http(address) as web:
        yield store, web


class Events:
    """The event stream of the dashboard."""

    def __init__(self, client: HttpClient) -> None:
        self._socket = socket.create_connection(client.host_and_port, timeout=60)
        shown = f"Authorization: Bearer {client.token}\r\n" if client.token else ""
        self._socket.sendall(f"GET /api/events HTTP/1.1\r\nHost: localhost\r\n{shown}\r\n".encode())
        self._file = http.client.HTTPResponse(self._socket)
        self._file.begin()
        self.status = self._file.status
        self.headers = {name.lower(): value for name, value in self._file.getheaders()}

    def next(self) -> tuple[str, Any]:
        """The next event; ("", None) at the end of the stream."""
        name = self._file.readline().decode().strip()
        if not name:
            return "", None
        data = self._file.readline().decode().strip()
        self._file.readline()
        return name.removeprefix("event: "), json.loads(data.removeprefix("data: "))

    def until(self, wanted: str) -> Any:
        while True:
            name, value = self.next()
            assert name, f"the stream ended before {wanted}"
            if name == wanted:
                return value

    def close(self) -> None:
        self._file.close()
        self._socket.close()


def populate(store: Store) -> None:
    """Fill a store with an example of everything that the dashboard shows."""
    with closing(store.sqlite("shop", create=True)) as shop:
        shop.execute("create table item(id integer primary key, name text)")
        shop.execute("insert into item(name) values ('apple'), ('pear')")
    store.snapshot("shop", "monday")
    store.fork("shop", "branch", at="monday")
    store.kv("sessions", create=True).put(b"a", b"b")
    store.create("clicks", "stream")
    store.feed.register(name="search")
    store.mirrors.create("lake", "shop", "item", f"parquet:{store.path}-lake", every_seconds=3600)
    add_catalog_rows(store)
    jobs = store.manifest.jobs
    failed = jobs.claim_job(jobs.enqueue(JobKind.COMPACTION, store.database("shop").db_id), "tester")
    assert failed is not None
    jobs.fail(failed, "the disk was full", permanent=True)


def add_catalog_rows(store: Store) -> None:
    """Add a page database of 40 slots, some with deltas, some damaged: catalog rows without data."""
    manifest, now = store.manifest, store.manifest.clock.now_ms()
    db_id = store.create("warehouse", "pages").db_id
    for number, lsn in ((1, 9), (2, 18)):
        segment = WalChunkUpdate(segment_id=number, first_lsn=lsn - 8, last_lsn=lsn, used_bytes=4096)
        append_wal_chunk(manifest, db_id, segment).result()
    bases = [
        FullChunk(
            slot=slot,
            record=ChunkRecord(
                Residency.LOCAL if slot % 2 else Residency.REMOTE_ARCHIVED,
                1 << 20,
                now,
                lsn_end=9,
                verified_at_ms=now,
                verify_state=VerifyState.ALTERED if slot == 7 else VerifyState.VERIFIED,
            ),
        )
        for slot in range(40)
    ]
    first = manifest.reserve_generation(db_id)
    checkpoint_apply(manifest, db_id, first, bases, covered_lsn=9).result()
    deltas = [
        DeltaChunk(slot=slot, delta_id=1, record=DeltaRecord(first, Residency.LOCAL, 4096, now, lsn_end=18))
        for slot in range(3)
    ]
    checkpoint_apply(manifest, db_id, manifest.reserve_generation(db_id), deltas, covered_lsn=18).result()
