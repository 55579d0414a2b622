"""Versions as files: the server sends the version, complete or in ranges, and it stays readable while it is read."""

from __future__ import annotations

import email
import shutil
import sqlite3
import subprocess
from contextlib import closing
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest

import quire
from quire.core.settings import MaintenanceSettings, StoreSettings
from quire.manifest.records import AuditAction, JobKind, JobState
from quire.service.signed_tokens import create_token
from quire.service.web import open_versions
from quire.service.web.open_versions import OpenVersions
from quire.service.web.ranges import RANGES_MAX
from quire.service.web.server import WebServer
from quire.service.web.version_files import PIECE_BYTES, VersionFiles
from quire.store.store import Store
from tests.service.web.http_client import HttpClient, Response

ROWS = "insert into item(text) select hex(randomblob(60)) from generate limit ?"


def fill(store: Store) -> None:
    """Fill a database with a few MiB."""
    with closing(store.sqlite("shop", create=True)) as connection:
        connection.execute("create table item(id integer primary key, text text)")
        connection.execute(
            "create view generate as with recursive r(n) as (select 1 union all select n + 1 from r) select n from r"
        )
        connection.execute(ROWS, (12_000,))


@pytest.fixture
def shop(store: Store) -> Store:
    """That database with versions: `monday`, then a version with deleted rows."""
    fill(store)
    store.snapshot("shop", "monday")
    with closing(store.sqlite("shop")) as connection:
        connection.execute("delete from item where id > 100")
    return store


def versions(web: WebServer) -> OpenVersions:
    (part,) = (part for part in web._web.parts if isinstance(part, VersionFiles))
    return part.versions


def count(body: bytes, folder: Path) -> int:
    """The number of rows in a file that was sent, and a check of its integrity."""
    path = folder / "sent.sqlite"
    path.write_bytes(body)
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
        assert connection.execute("pragma integrity_check").fetchall() == [("ok",)]
        number: int = connection.execute("select count(*) from item").fetchone()[0]
        return number


def test_every_way_to_name_a_version_sends_that_version(shop: Store, anonymous: HttpClient, tmp_path: Path) -> None:
    with closing(shop.sqlite("shop")) as connection:
        epoch = connection.pragma("quire_epoch")
        connection.execute("delete from item")
    now = anonymous.get("/db/shop.sqlite")
    monday = anonymous.get("/db/shop@monday.sqlite")
    assert count(now.body, tmp_path) == 0
    assert count(monday.body, tmp_path) == 12_000
    assert count(anonymous.get(f"/db/shop@{epoch}.sqlite").body, tmp_path) == 100
    future, never = "2990-01-01T00:00:00Z", "1990-01-01T00:00:00+00:00"
    assert anonymous.get(f"/db/shop@{future}.sqlite").headers["etag"] == now.headers["etag"]
    assert anonymous.get(f"/db/shop@{never}.sqlite").status == 404
    assert anonymous.get(f"/db/shop@{10**9}.sqlite").status == 400, "this version does not exist yet"
    assert now.headers["content-type"] == "application/vnd.sqlite3"
    assert monday.headers["etag"] != now.headers["etag"]
    exported = tmp_path / "exported.sqlite"
    quire.sqlite.export_file(shop.pages, "shop", exported, snapshot="monday")
    assert exported.read_bytes() == monday.body


def test_a_database_without_pages_is_an_empty_file(store: Store, anonymous: HttpClient) -> None:
    store.create("empty", "pages")
    response = anonymous.get("/db/empty.sqlite")
    assert (response.status, response.body, response.headers["content-length"]) == (200, b"", "0")


def test_names_are_percent_decoded(store: Store, anonymous: HttpClient) -> None:
    with closing(store.sqlite("größe 1", create=True)) as connection:
        connection.execute("create table t(a)")
    store.snapshot("größe 1", "v 1.0")
    response = anonymous.get("/db/gr%C3%B6%C3%9Fe%201@v%201.0.sqlite")
    assert response.status == 200
    assert "gr%C3%B6%C3%9Fe%201%40v%201.0.sqlite" in response.headers["content-disposition"]


# ── ranges ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_ranges_are_parts_of_the_whole(shop: Store, anonymous: HttpClient) -> None:
    whole = anonymous.get("/db/shop@monday.sqlite").body
    size = len(whole)
    assert size > 4 * PIECE_BYTES
    for header, part in (
        ("bytes=0-0", whole[:1]),
        ("bytes=0-99", whole[:100]),
        ("bytes=4090-4100", whole[4090:4101]),
        (f"bytes=100-{PIECE_BYTES + 5000}", whole[100 : PIECE_BYTES + 5001]),
        ("bytes=-7", whole[-7:]),
        (f"bytes=-{size * 2}", whole),
        (f"bytes={size - 1}-", whole[-1:]),
        (f"bytes={size - 3}-{size * 9}", whole[-3:]),
        ("BYTES = 5 - 6", whole[5:7]),
    ):
        response = anonymous.get("/db/shop@monday.sqlite", Range=header)
        assert (response.status, response.body) == (206, part), header
        first = int(response.headers["content-range"].split()[1].split("-")[0])
        assert response.headers["content-range"] == f"bytes {first}-{first + len(part) - 1}/{size}"


def test_several_ranges_are_sent_in_one_answer(shop: Store, anonymous: HttpClient) -> None:
    whole = anonymous.get("/db/shop@monday.sqlite").body
    response = anonymous.get("/db/shop@monday.sqlite", Range=f"bytes=0-9, 5000-{PIECE_BYTES + 9000}, -4")
    assert response.status == 206
    message: Any = email.message_from_bytes(
        b"content-type: " + response.headers["content-type"].encode() + b"\r\n\r\n" + response.body
    )
    parts = message.get_payload()
    assert [part["content-range"].split("/")[1] for part in parts] == [str(len(whole))] * 3
    wanted = [whole[:10], whole[5000 : PIECE_BYTES + 9001], whole[-4:]]
    assert [part.get_payload(decode=True) for part in parts] == wanted


def test_unsatisfiable_ranges_are_refused_with_the_size(shop: Store, anonymous: HttpClient) -> None:
    size = int(anonymous.request("HEAD", "/db/shop.sqlite").headers["content-length"])
    wrong = [
        f"bytes={size}-", "bytes=99999999999999-", "bytes=-0", "bytes=5-4", "bytes=a-b", "bytes=", "bytes=-", "bytes=1",
        "bytes=0-1,0-1", "bytes=0-10,5-20", "bytes=0x1-2", "bytes=1--2", f"bytes={'9' * 4000}-",
        "bytes=" + ",".join(f"{n}-{n}" for n in range(RANGES_MAX + 1)), "bytes=" + "," * 1000,
    ]  # fmt: skip
    for header in wrong:
        response = anonymous.get("/db/shop.sqlite", Range=header)
        assert (response.status, response.headers["content-range"]) == (416, f"bytes */{size}"), header[:40]
        assert response.json["message"]
    for ignored in ("lines=1-2", "bytes", ""):
        assert anonymous.get("/db/shop.sqlite", Range=ignored).status == 200


def test_head_returns_the_headers_of_get_for_a_version(shop: Store, anonymous: HttpClient) -> None:
    for headers in ({}, {"Range": "bytes=0-99"}):
        whole, head = (
            anonymous.get("/db/shop.sqlite", **headers),
            anonymous.request("HEAD", "/db/shop.sqlite", **headers),
        )
        same = ("content-length", "etag", "accept-ranges", "cache-control", "content-type", "x-quire-epoch")
        assert [head.headers[name] for name in same] == [whole.headers[name] for name in same]
        assert (head.status, head.body) == (whole.status, b"")


# ── caches ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_an_epoch_can_be_cached_for_ever_and_a_name_is_revalidated(shop: Store, anonymous: HttpClient) -> None:
    now = anonymous.get("/db/shop.sqlite")
    epoch = now.headers["x-quire-epoch"]
    assert "immutable" in anonymous.get(f"/db/shop@{epoch}.sqlite").headers["cache-control"]
    for name in ("shop", "shop@monday"):
        assert anonymous.get(f"/db/{name}.sqlite").headers["cache-control"] == "private, no-cache"


def test_an_unchanged_version_is_not_sent_again(shop: Store, anonymous: HttpClient) -> None:
    tag = anonymous.get("/db/shop.sqlite").headers["etag"]
    for known in (tag, f"W/{tag}", f'"other", {tag}', "*"):
        response = anonymous.get("/db/shop.sqlite", If_None_Match=known)
        assert (response.status, response.body, response.headers["etag"]) == (304, b"", tag), known
    with closing(shop.sqlite("shop")) as connection:
        connection.execute("delete from item")
    changed = anonymous.get("/db/shop.sqlite", If_None_Match=tag)
    assert (changed.status, changed.headers["etag"] != tag) == (200, True)


def test_parts_of_two_versions_are_never_mixed(shop: Store, anonymous: HttpClient) -> None:
    tag = anonymous.get("/db/shop.sqlite").headers["etag"]
    assert anonymous.get("/db/shop.sqlite", Range="bytes=0-9", If_Range=tag).status == 206
    with closing(shop.sqlite("shop")) as connection:
        connection.execute("delete from item")
    for known in (tag, formatdate(0, usegmt=True), '"x"'):
        response = anonymous.get("/db/shop.sqlite", Range="bytes=0-9", If_Range=known)
        assert (response.status, len(response.body)) == (200, int(response.headers["content-length"]))


def test_another_database_of_the_same_name_has_another_etag(shop: Store, anonymous: HttpClient) -> None:
    tag = anonymous.get("/db/shop.sqlite").headers["etag"]
    shop.drop("shop", snapshots=True)
    assert anonymous.get("/db/shop.sqlite").status == 404
    with closing(shop.sqlite("shop", create=True)) as connection:
        connection.execute("create table item(a)")
    assert anonymous.get("/db/shop.sqlite").headers["etag"] != tag


def test_an_epoch_that_a_restored_backup_lost_is_never_another_version(path: Path, tmp_path: Path) -> None:
    """Caches keep an epoch for good. The restored store gave the lsns of lost commits to others, with the same tags."""
    with quire.open(path) as store:
        with closing(store.sqlite("shop", create=True)) as connection:
            connection.execute("create table item(id integer primary key, text text)")
        target = store.backup(str(tmp_path / "backup")).target
    with quire.open(path) as store, store.serve_http("127.0.0.1:0") as web:
        with closing(store.sqlite("shop")) as connection:
            connection.execute("insert into item values (1, 'lost')")
        lost = HttpClient(web.address).get("/db/shop.sqlite").headers
    quire.restore(target, tmp_path / "restored")
    with quire.open(tmp_path / "restored") as store, store.serve_http("127.0.0.1:0") as web:
        client, tags = HttpClient(web.address), set()
        for number in range(3):
            with closing(store.sqlite("shop")) as connection:
                connection.execute("insert into item values (?, 'other')", (number,))
            tags.add(client.get("/db/shop.sqlite").headers["etag"])
        answer = client.get(f"/db/shop@{lost['x-quire-epoch']}.sqlite")
        assert (answer.status, answer.json["error"]) == (404, "EpochLost")
        assert lost["etag"] not in tags


def test_another_store_has_other_etags(shop: Store, anonymous: HttpClient) -> None:
    """A clone has its origin's database ids, and the first lsns of its range can be those of a takeover of its origin."""
    tag = anonymous.get("/db/shop.sqlite").headers["etag"]
    with shop.manifest.read() as txn:
        assert txn.store_id() in tag


# ── leases ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def deleted(store: Store) -> int:
    """The number of deleted artifacts, after everything due was deleted."""
    store.maintain()
    for job in store.manifest.jobs.jobs(JobState.PENDING):
        if job.kind is JobKind.DELETE:
            store.worker.run(job.job_id)
    return sum(entry.action is AuditAction.DELETED for entry in store.manifest.audit())


def test_a_snapshot_that_is_dropped_during_a_read_is_read_to_its_end(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease of the file holds its pages until the read ends."""
    collecting = StoreSettings(maintenance=MaintenanceSettings(enabled=False, delete_grace_seconds=0.0))
    with quire.open(path, settings=collecting) as store, store.serve_http("127.0.0.1:0") as web:
        fill(store)
        store.checkpoint("shop", runner="threads")
        store.snapshot("shop", "monday")
        pieces: list[int] = []
        read = OpenVersions.read

        def dropping(self: OpenVersions, *args: Any, **kwargs: Any) -> bytes:
            if len(pieces) == 1:
                with closing(store.sqlite("shop")) as connection:
                    connection.execute("delete from item")
                    connection.execute("vacuum")
                store.checkpoint("shop", runner="threads")
                store.merge("shop", runner="threads")
                store.manifest.snapshots.drop("shop", "monday")
            pieces.append(deleted(store))
            return read(self, *args, **kwargs)

        monkeypatch.setattr(OpenVersions, "read", dropping)
        response = HttpClient(web.address).get("/db/shop@monday.sqlite")
        assert count(response.body, tmp_path) == 12_000
        assert len(pieces) > 2
        assert set(pieces) == {pieces[0]}, "nothing was deleted during the read"
        assert HttpClient(web.address).get("/db/shop@monday.sqlite").status == 404
        versions(web).close_idle(0)
        assert store.manifest.leases.count() == 0
        assert deleted(store) > pieces[0], "without the read, they are deleted"


def test_nothing_is_held_after_the_last_read(shop: Store, anonymous: HttpClient, web: WebServer) -> None:
    epoch = anonymous.get("/db/shop.sqlite", Range="bytes=0-9").headers["x-quire-epoch"]
    for name in ("shop", "shop@monday", f"shop@{epoch}"):
        for _ in range(3):
            assert anonymous.get(f"/db/{name}.sqlite", Range="bytes=0-9").status == 206
    assert versions(web).now == 3
    versions(web).close_idle(0)
    assert versions(web).now == 0
    assert shop.manifest.leases.count() == 0
    db_id = shop.database("shop").db_id
    assert not [lease for lease in shop.pages.readers(db_id) if lease.info.tags == open_versions.TAGS]


def test_open_versions_are_limited_and_idle_ones_are_closed_first(
    shop: Store, anonymous: HttpClient, web: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_versions, "OPEN_MAX", 2)
    shop.snapshot("shop", "tuesday")
    for name in ("shop", "shop@monday", "shop@tuesday", "shop"):
        assert anonymous.get(f"/db/{name}.sqlite", Range="bytes=0-9").status == 206
    assert versions(web).now == 2
    for version in versions(web)._open.values():
        version.users += 1
    response = anonymous.get("/db/shop@tuesday.sqlite", Range="bytes=0-9")
    held = {version.key[1] for version in versions(web)._open.values()}
    assert response.status == (206 if len(held & {"snapshot"}) else 503)
    for version in versions(web)._open.values():
        version.users -= 1


# ── permissions ───────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_token_of_one_database_reads_that_one(shop: Store, anonymous: HttpClient) -> None:
    shop.create("other", "pages")
    reader = HttpClient(anonymous.address, create_token(shop.path, ["shop"], read_only=True, ttl_seconds=600))
    assert reader.get("/db/shop@monday.sqlite").status == 200
    refusals = [reader.get(f"/db/{name}.sqlite") for name in ("other", "nothing", "other@monday")]
    assert {(response.status, response.body) for response in refusals} == {(403, refusals[0].body)}


def test_other_methods_and_other_kinds_are_refused(shop: Store, admin: HttpClient) -> None:
    shop.create("clicks", "stream")
    assert admin.get("/db/clicks.sqlite").json["error"] == "WrongKind"
    response: Response = admin.request("DELETE", "/db/shop.sqlite")
    assert (response.status, set(response.headers["allow"].split(", "))) == (405, {"GET", "HEAD"})


# ── programs without quire ────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.skipif(
    not shutil.which("curl") or not shutil.which("sqlite3"), reason="curl and sqlite3 are not installed"
)
def test_curl_and_sqlite3_read_it(shop: Store, anonymous: HttpClient, tmp_path: Path) -> None:
    url, target = f"{anonymous.address}/db/shop@monday.sqlite", tmp_path / "shop.sqlite"
    half = subprocess.run(["curl", "-sf", "-r", "0-4999", url], capture_output=True, check=True).stdout
    target.write_bytes(half)
    subprocess.run(["curl", "-sf", "-C", "-", "-o", str(target), url], check=True)  # resumes the download
    result = subprocess.run(
        ["sqlite3", str(target), "pragma integrity_check; select count(*) from item"], capture_output=True, check=True
    )
    assert result.stdout.split() == [b"ok", b"12000"]
