"""A store that is served over HTTP, and somebody who asks it."""

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
from tests.service.world import settings

JSON = "application/json"


@dataclass
class Told:
    """One answer."""

    status: int
    headers: dict[str, str]
    body: bytes = field(repr=False)

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Asker:
    """Asks one server; `token` is shown if it is not empty."""

    address: str
    token: str = ""

    @property
    def place(self) -> tuple[str, int]:
        parts = urlsplit(self.address)
        return parts.hostname or "", parts.port or 0

    def ask(self, method: str, path: str, body: bytes | None = None, /, **headers: str) -> Told:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        if self.token:
            sent.setdefault("Authorization", f"Bearer {self.token}")
        connection = http.client.HTTPConnection(*self.place, timeout=60)
        try:
            connection.request(method, path, body, sent)
            answer = connection.getresponse()
            return Told(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> Told:
        return self.ask("GET", path, **headers)

    def post(self, path: str, value: Any = None, **headers: str) -> Told:
        return self.ask("POST", path, json.dumps(value or {}).encode(), **{"Content_Type": JSON, **headers})

    def raw(self, data: bytes) -> bytes:
        """What the server says to these very bytes, until it hangs up or is silent."""
        with socket.create_connection(self.place, timeout=60) as connection:
            connection.sendall(data)
            said = b""
            try:
                while piece := connection.recv(65_536):
                    said += piece
            except (TimeoutError, ConnectionResetError):
                pass
            return said


def admin(web: WebServer, store: Store) -> Asker:
    """Somebody who may do everything."""
    return Asker(web.address, (Path(store.path) / "admin.token").read_text().strip())


@contextmanager
def web_served(path: Path, address: str = "127.0.0.1:0", **service: Any) -> Iterator[tuple[Store, WebServer]]:
    """A store and its HTTP side."""
    with quire.open(path, settings=settings(**service)) as store, store.serve_http(address) as web:
        yield store, web


class Events:
    """A page's live updates, read by hand."""

    def __init__(self, asker: Asker) -> None:
        self._socket = socket.create_connection(asker.place, timeout=60)
        shown = f"Authorization: Bearer {asker.token}\r\n" if asker.token else ""
        self._socket.sendall(f"GET /api/events HTTP/1.1\r\nHost: localhost\r\n{shown}\r\n".encode())
        self._file = http.client.HTTPResponse(self._socket)
        self._file.begin()
        self.status = self._file.status
        self.headers = {name.lower(): value for name, value in self._file.getheaders()}

    def next(self) -> tuple[str, Any]:
        """The next event; ("", None) at the end."""
        name = self._file.readline().decode().strip()
        if not name:
            return "", None
        data = self._file.readline().decode().strip()
        self._file.readline()
        return name.removeprefix("event: "), json.loads(data.removeprefix("data: "))

    def until(self, wanted: str) -> Any:
        while True:
            name, value = self.next()
            assert name, f"over before {wanted}"
            if name == wanted:
                return value

    def close(self) -> None:
        self._file.close()
        self._socket.close()


def furnish(store: Store) -> None:
    """A store with something of everything a page shows."""
    with closing(store.sqlite("shop", create=True)) as shop:
        shop.execute("create table item(id integer primary key, name text)")
        shop.execute("insert into item(name) values ('apple'), ('pear')")
    store.snapshot("shop", "monday")
    store.fork("shop", "branch", at="monday")
    store.kv("sessions", create=True).put(b"a", b"b")
    store.create("clicks", "stream")
    store.feed.register(name="search")
    store.mirrors.create("lake", "shop", "item", f"parquet:{store.path}-lake", every_seconds=3600)
    made_up(store)
    jobs = store.manifest.jobs
    failed = jobs.claim_job(jobs.enqueue(JobKind.COMPACTION, store.database("shop").db_id), "tester")
    assert failed is not None
    jobs.fail(failed, "the disk was full", permanent=True)


def made_up(store: Store) -> None:
    """A page database of 40 slots, some with deltas, some damaged: rows of the catalog, no bytes."""
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
