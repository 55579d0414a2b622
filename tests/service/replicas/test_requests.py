"""Requests of replicas at the byte level: answers to valid requests, and errors for invalid ones."""

from __future__ import annotations

import asyncio
import itertools
import json
import struct
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any, NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyroaring import BitMap
from starlette.requests import ClientDisconnect
from starlette.types import Message

from quire.core.errors import InvalidInput, Overloaded, QuireError, Unavailable
from quire.pages.pagestore import PageStore
from quire.service.replicas import frames, pulls, routes
from quire.service.replicas.positions import STEP, tag_of
from quire.service.replicas.protobuf import bytes_field, number_field, read_message, varint
from quire.service.replicas.pull_messages import read_request
from quire.service.replicas.pulls import history_of
from quire.service.replicas.revisions import HistoryId, Revision
from quire.service.signed_tokens import create_token
from quire.service.web.server import WebServer
from quire.store.store import Store
from tests.service.web.http_client import HttpClient, Response, admin_client, web_served

PAGE = 4096
FRAME = 24 + PAGE


@pytest.fixture
def store_and_web(tmp_path: Path) -> Iterator[tuple[Store, WebServer]]:
    with web_served(tmp_path / "store") as pair:
        _sql(pair[0], "CREATE TABLE t(a)", "INSERT INTO t VALUES (1)")
        yield pair


@pytest.fixture
def store(store_and_web: tuple[Store, WebServer]) -> Store:
    return store_and_web[0]


@pytest.fixture
def admin(store_and_web: tuple[Store, WebServer]) -> HttpClient:
    return admin_client(store_and_web[1], store_and_web[0])


def test_the_default_database_can_be_replicated_before_its_first_write(tmp_path: Path) -> None:
    """`libsql.connect(file, sync_url=…)` fetches an export before it sends any SQL."""
    with web_served(tmp_path / "store") as (store, server):
        reader = HttpClient(server.address)
        for address in ("/info", "/export/1", "/sync/1/1/1"):
            assert reader.request("GET", address).status == 404, "a read-only token creates no database"
        response = admin_client(server, store).request("GET", "/info")
        assert (response.status, "current_generation" in json.loads(response.body)) == (200, True)
        assert [info.name for info in store.databases()] == [store.settings.service.sql_default_database]
        assert admin_client(server, store).request("GET", "/db/other/info").status == 404


def _sql(store: Store, *statements: str, name: str = "shop") -> None:
    with closing(store.sqlite(name, create=True)) as connection:
        for statement in statements:
            connection.execute(statement)


def _fill(store: Store, rows: int, name: str = "shop") -> None:
    with closing(store.sqlite(name, create=True)) as connection, connection:
        connection.executemany("INSERT INTO t VALUES (randomblob(3000))", [()] * rows)


# ── Turso ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
class Pulled:
    """The decoded answer to a pull."""

    def __init__(self, response: Response) -> None:
        assert response.status == 200, response.body
        parts, at = [], 0
        while at < len(response.body):
            size = shift = 0
            while True:
                byte = response.body[at]
                size |= (byte & 0x7F) << shift
                shift, at = shift + 7, at + 1
                if byte < 0x80:
                    break
            parts.append(read_message(response.body[at : at + size]))
            at += size
        header, *pages = parts
        assert header[3] == b"", "pages are not compressed"
        self.revision = bytes(header[1]).decode()
        self.size = header.get(2, 0)
        self.pages = {int(page.get(1, 0)): page[2] for page in pages}
        assert len(self.pages) == len(pages)


def _ask(
    client: HttpClient, *, at: str = "", since: str = "", pages: object = None, poll_ms: int = 0, name: str = "shop"
) -> Response:
    selector = BitMap(pages).serialize() if pages is not None else b""  # type: ignore[arg-type]
    body = (
        bytes_field(2, at.encode())
        + bytes_field(3, since.encode())
        + number_field(4, poll_ms)
        + (bytes_field(5, selector) if selector else b"")
    )
    return client.request("POST", f"/db/{name}/pull-updates", body)


def _pages(store: Store, name: str = "shop") -> dict[int, bytes]:
    with store.pages.open(name).open_snapshot() as reader:
        return dict(reader.scan())


def test_a_first_pull_has_every_page_and_a_second_one_none(store: Store, admin: HttpClient) -> None:
    _fill(store, 20)
    first = Pulled(_ask(admin))
    assert first.pages == _pages(store)
    assert first.size == len(first.pages)
    repeated = Pulled(_ask(admin, since=first.revision))
    assert (repeated.pages, repeated.revision, repeated.size) == ({}, first.revision, first.size)
    _sql(store, "INSERT INTO t VALUES (2)")
    more = Pulled(_ask(admin, since=first.revision))
    assert {**first.pages, **more.pages} == _pages(store)
    assert 0 < len(more.pages) < 4
    assert 0 in more.pages


def test_selected_pages_are_those_of_the_version_that_is_named(store: Store, admin: HttpClient) -> None:
    _fill(store, 20)
    before, first = _pages(store), Pulled(_ask(admin, pages=range(3)))
    assert set(first.pages) == {0, 1, 2}
    _sql(store, "UPDATE t SET a = 0")
    store.checkpoint("shop")
    wanted = range(2, 9)
    assert Pulled(_ask(admin, at=first.revision, pages=wanted)).pages == {page: before[page] for page in wanted}
    beyond_end = Pulled(_ask(admin, at=first.revision, pages=[1, 4_000_000_000]))
    assert set(beyond_end.pages) == {1}, "pages beyond the end of the version are not sent"


def test_a_pull_of_a_dropped_version_is_refused_if_a_requested_page_has_changed(
    store: Store, store_and_web: tuple[Store, WebServer], admin: HttpClient
) -> None:
    _fill(store, 20)
    store.checkpoint("shop")
    first = Pulled(_ask(admin, pages=[0]))
    _sql(store, "UPDATE t SET a = zeroblob(3000) WHERE rowid = 20")
    (part,) = [part for part in store_and_web[1]._web.parts if isinstance(part, routes.ReplicaPart)]
    part._held.close()
    store.checkpoint("shop")
    changed = set(Pulled(_ask(admin, since=first.revision)).pages)
    same = set(range(20)) - changed
    assert Pulled(_ask(admin, at=first.revision, pages=same)).pages == {page: _pages(store)[page] for page in same}
    response = _ask(admin, at=first.revision, pages=[*same, *changed])
    assert (response.status, response.json["error"]) == (404, "SnapshotGone")


def test_a_pull_waits_for_a_change_until_its_timeout(store: Store, admin: HttpClient) -> None:
    first = Pulled(_ask(admin))
    assert Pulled(_ask(admin, since=first.revision, poll_ms=50)).pages == {}
    _sql(store, "INSERT INTO t VALUES (3)")
    assert Pulled(_ask(admin, since=first.revision, poll_ms=60_000)).pages


def test_a_revision_of_another_database_is_answered_with_every_page(store: Store, admin: HttpClient) -> None:
    first = Pulled(_ask(admin))
    store.fork("shop", "fork")
    with store.manifest.read() as txn:
        other = HistoryId.of(txn, store.database("fork").db_id)
    assert Revision.parse(first.revision).history != other
    response = Pulled(_ask(admin, since=first.revision, name="fork"))
    assert response.pages == _pages(store, "fork")
    assert Revision.parse(response.revision) == Revision(other, Revision.parse(first.revision).lsn), (
        "the lsn is the same"
    )
    assert _ask(admin, at=first.revision, pages=[0], name="fork").status == 409


def test_wrong_pulls_are_refused(store: Store, admin: HttpClient, store_and_web: tuple[Store, WebServer]) -> None:
    revision = Pulled(_ask(admin)).revision
    for wrong in ("x", revision[:-1], revision.replace("1-", "2-", 1), revision + "0", "1-" * 60):
        for field in ("since", "at"):
            response = _ask(admin, **{field: wrong})  # type: ignore[arg-type]
            assert (response.status, response.json["error"]) == (400, "InvalidInput"), wrong
    for body in (b"\xff", b"\x1a\x7fabc", b"\x08", b"\x1a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff", b"\x07"):
        assert admin.request("POST", "/db/shop/pull-updates", body).status == 400, body
    assert admin.request("POST", "/db/shop/pull-updates", bytes_field(5, b"\x3a\x30\x00\x00\x01")).status == 400
    assert admin.request("POST", "/db/shop/pull-updates", bytes(2 << 20)).status == 413
    assert admin.request("POST", "/db/none/pull-updates", b"").status == 404
    assert admin.request("POST", "/db/shop@1/pull-updates", b"").status == 400
    assert admin.request("GET", "/db/shop/pull-updates").status == 405
    unknown_client = HttpClient(store_and_web[1].address, "not-a-token-of-this-store")
    for method, path in (
        ("POST", "/db/shop/pull-updates"),
        ("GET", "/db/shop/info"),
        ("GET", "/db/shop/export/1"),
        ("GET", "/db/shop/sync/1/1/2"),
    ):
        assert unknown_client.request(method, path, b"" if method == "POST" else None).status == 401


def test_a_replica_needs_a_grant_for_its_database(store: Store, store_and_web: tuple[Store, WebServer]) -> None:
    _sql(store, "CREATE TABLE t(a)", name="other")
    reader = HttpClient(store_and_web[1].address, create_token(store.path, ["shop"], read_only=True))
    generation = _generation(reader)
    assert Pulled(_ask(reader)).pages == _pages(store)
    assert reader.request("GET", f"/db/shop/export/{generation}").status == 200
    for name in ("other", "none"):
        response = _ask(reader, name=name)
        assert (response.status, response.json["message"]) == (403, "this database may not be used with this token")
        for path in ("info", f"export/{generation}", f"sync/{generation}/1/2"):
            assert reader.request("GET", f"/db/{name}/{path}").status == 403
    pushed = b'{"requests": [{"type": "execute", "stmt": {"sql": "DELETE FROM t"}}]}'
    assert b'"error"' in reader.request("POST", "/db/shop/v2/pipeline", pushed).body, "pushing needs write permission"
    with closing(store.sqlite("shop")) as connection:
        assert connection.execute("SELECT count(*) FROM t").fetchall() == [(1,)]


def test_other_page_sizes_are_refused_with_a_way_out(store: Store, admin: HttpClient) -> None:
    with closing(store.sqlite("wide", create=True, page_size=8192)) as connection:
        connection.execute("CREATE TABLE t(a)")
    response = _ask(admin, name="wide")
    assert (response.status, "4,096" in response.json["message"]) == (400, True)


@given(st.binary(max_size=200))
def test_any_bytes_are_parsed_as_a_request_or_refused(data: bytes) -> None:
    try:
        request = read_request(data)
    except InvalidInput:
        return
    assert len(request.at) <= 256


@given(st.dictionaries(st.integers(1, 1 << 28), st.one_of(st.integers(1, (1 << 64) - 1), st.binary(max_size=300))))
def test_messages_decode_to_what_was_encoded(fields: dict[int, int | bytes]) -> None:
    data = b"".join(
        number_field(number, value) if isinstance(value, int) else bytes_field(number, value)
        for number, value in fields.items()
    )
    assert read_message(data) == fields
    for cut in range(len(data)):
        try:
            part = read_message(data[:cut])
        except QuireError:
            continue
        assert all(fields[number] == value for number, value in part.items())


@given(st.text("0123456789abcdef", min_size=32, max_size=32), st.integers(1, 2**32 - 1), st.integers(0, 2**53))
def test_a_revision_round_trips_and_one_changed_character_is_detected(store_id: str, db_id: int, number: int) -> None:
    revision = Revision(HistoryId(store_id, db_id, number), number * 7 % 2**53)
    text = str(revision)
    assert Revision.parse(text) == revision
    for index in range(len(text)):
        wrong = text[:index] + ("0" if text[index] != "0" else "1") + text[index + 1 :]
        with pytest.raises(InvalidInput):
            Revision.parse(wrong)


# ── libSQL ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def _frames(response: Response) -> tuple[dict[int, bytes], int]:
    """(page → image, database size at the end) of frames. Only the last frame ends a transaction."""
    assert response.status == 200, response.body
    assert response.body
    assert len(response.body) % FRAME == 0
    pages, sizes = {}, []
    for at in range(0, len(response.body), FRAME):
        page, size = struct.unpack_from(">II", response.body, at)
        pages[page - 1] = response.body[at + 24 : at + FRAME]
        sizes.append(size)
    assert not any(sizes[:-1])
    return pages, sizes[-1]


def _generation(admin: HttpClient, name: str = "shop") -> int:
    number: int = admin.request("GET", f"/db/{name}/info").json["current_generation"]
    return number


def _as_log(pages: dict[int, bytes]) -> dict[int, bytes]:
    return {**pages, 0: frames.with_log(pages[0])}


def test_an_export_and_frames_give_the_database(store: Store, admin: HttpClient) -> None:
    _fill(store, 20)
    generation = _generation(admin)
    assert _generation(admin) == generation, "the generation is stable for a while"
    exported = admin.request("GET", f"/db/shop/export/{generation}").body
    assert exported == b"".join(_as_log(_pages(store)).values())
    response = admin.request("GET", f"/db/shop/sync/{generation}/1/129")
    assert (response.status, response.json) == (400, {"generation": generation}), "no change to fetch"
    _sql(store, "INSERT INTO t VALUES (2)")
    pages, size = _frames(admin.request("GET", f"/db/shop/sync/{generation}/1/129"))
    assert size == len(_pages(store))
    assert 0 < len(pages) < 4
    replica = {page: exported[page * PAGE : (page + 1) * PAGE] for page in range(len(exported) // PAGE)}
    assert {**replica, **pages} == _as_log(_pages(store))


def test_a_long_answer_is_split_and_its_version_held_until_the_rest_is_fetched(
    store: Store, admin: HttpClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frames, "FRAMES_MAX", STEP)
    generation = _generation(admin)
    _fill(store, 200)
    wanted = _as_log(_pages(store))
    pages, size, at, answers = dict[int, bytes](), 0, 0, 0
    while not size:
        response = admin.request("GET", f"/db/shop/sync/{generation}/{at + 1}/{at + 129}")
        assert len(response.body) <= STEP * FRAME
        more, size = _frames(response)
        pages |= more
        at, answers = at + len(response.body) // FRAME, answers + 1
        _sql(store, "UPDATE t SET a = randomblob(3000) WHERE rowid % 7 = 0")
        store.checkpoint("shop")
    assert answers > 2
    assert (pages, size) == (wanted, len(wanted)), "all parts are of one version, despite concurrent writes"
    pages, size = {}, 0
    while not size:
        response = admin.request("GET", f"/db/shop/sync/{generation}/{at + 1}/{at + 129}")
        more, size = _frames(response)
        pages |= more
        at += len(response.body) // FRAME
    assert {**wanted, **pages} == _as_log(_pages(store))


def test_a_request_that_fails_holds_no_version(
    store: Store, admin: HttpClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hazard: an error after the version was opened, such as an invalid revision, left its reader open."""
    monkeypatch.setattr(frames, "FRAMES_MAX", STEP)
    generation, db_id = _generation(admin), store.database("shop").db_id
    _fill(store, 200)
    assert admin.request("GET", f"/db/shop/sync/{generation}/1/129").status == 200
    first = Pulled(_ask(admin, pages=[0]))

    def refuse(*_: object) -> NoReturn:
        raise Unavailable("as if")

    before = len(store.pages.readers(db_id))
    assert _ask(admin, at=first.revision, since="nonsense", pages=[0]).status == 400
    monkeypatch.setattr(frames.FrameAnswers, "_cut", refuse)
    assert admin.request("GET", f"/db/shop/sync/{generation}/{STEP + 1}/{STEP + 129}").status == 503
    assert len(store.pages.readers(db_id)) == before


def test_two_replicas_with_long_answers_do_not_mix_their_parts(
    store: Store, admin: HttpClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frames, "FRAMES_MAX", 2 * STEP)
    generation = _generation(admin)
    _fill(store, 150)
    states = []
    for _ in range(2):
        response = admin.request("GET", f"/db/shop/sync/{generation}/1/129")
        states.append((_frames(response)[0], len(response.body) // FRAME, _as_log(_pages(store))))
        _fill(store, 30)
        _sql(store, "UPDATE t SET a = zeroblob(3000) WHERE rowid < 60")
    assert states[0][1] != states[1][1], "they are split at different frame numbers"
    for pages, at, wanted in states:
        size, reached, received = 0, at, dict(pages)
        while not size:
            response = admin.request("GET", f"/db/shop/sync/{generation}/{reached + 1}/{reached + 129}")
            more, size = _frames(response)
            received |= more
            reached += len(response.body) // FRAME
        assert received == wanted


def test_wrong_positions_are_answered_with_another_generation_or_refused(store: Store, admin: HttpClient) -> None:
    generation = _generation(admin)
    tag = tag_of(history_of(store.manifest, store.database("shop").db_id))
    assert generation & 0xFF == tag
    for position in (f"{generation}/6/134", f"{generation + 1}/1/129", "7/8/136"):
        response = admin.request("GET", f"/db/shop/sync/{position}")
        number = response.json["generation"]
        assert (response.status, number & 0xFF) == (400, tag)
        assert int(position.partition("/")[0]) < number
        pages, size = _frames(admin.request("GET", f"/db/shop/sync/{number}/1/129"))
        assert pages == _as_log(_pages(store)), "the other generation has every page"
        assert size == len(pages)
    interrupted = admin.request("GET", f"/db/shop/sync/{generation}/{STEP + 1}/200")
    assert (interrupted.status, interrupted.json["error"]) == (409, "Conflict")
    for wrong in ("0/1/2", f"{generation}/0/2", f"{2**40}/1/2", f"{generation}/{2**40}/2"):
        assert admin.request("GET", f"/db/shop/sync/{wrong}").status == 400, wrong
    for wrong in ("x/1/2", "-1/1/2", f"{generation}/1", f"{generation}/1/2/3"):
        assert admin.request("GET", f"/db/shop/sync/{wrong}").status in (404, 405), wrong
    assert admin.request("GET", f"/db/shop/export/{generation + 256}").status == 400
    assert admin.request("GET", f"/db/shop/export/{generation ^ 1}").status == 400
    pushed = admin.request("POST", f"/db/shop/sync/{generation}/1/2", bytes(FRAME))
    assert (pushed.status, "offline" in json.loads(pushed.body)["message"]) == (501, True)


def test_too_many_answers_at_once_are_refused_and_counted(
    store: Store, store_and_web: tuple[Store, WebServer], admin: HttpClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "STREAMS_MAX", 0)
    assert _ask(admin).status == 503
    assert not store.pages.readers(store.database("shop").db_id), "every version is closed"
    assert store_and_web[1]._web.context.limits.counts()["replica_streams"] == 1


def _none(images: dict[int, bytes], first: int, count: int) -> list[bytes]:
    return []


@pytest.mark.parametrize("version", ["2.0", "2.4"])
def test_an_answer_whose_client_leaves_before_the_first_byte_releases_its_version(
    store: Store, store_and_web: tuple[Store, WebServer], version: str
) -> None:
    (part,) = [part for part in store_and_web[1]._web.parts if isinstance(part, routes.ReplicaPart)]
    database = store.database("shop").db_id

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(_: Message) -> None:
        raise OSError("the client is gone")

    async def answer() -> None:
        reader = store.pages.open("shop").open_snapshot()
        response = part._stream(reader, range(reader.size_pages), _none, routes.BINARY)
        with suppress(OSError, ClientDisconnect):
            await response({"type": "http", "asgi": {"spec_version": version}}, receive, send)

    asyncio.run(answer())
    assert not store.pages.readers(database), "every version is closed"
    assert part._streams == 0


def test_a_failed_wait_for_changes_releases_its_version(
    store: Store, admin: HttpClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    revision = Pulled(_ask(admin)).revision
    opened = pulls.open_replicated
    calls = itertools.count(1)

    def failing(*arguments: Any) -> PageStore:
        if next(calls) > 1:
            raise Unavailable("the disk is away", hint="try again later")
        return opened(*arguments)

    monkeypatch.setattr(routes, "open_replicated", failing)
    assert _ask(admin, since=revision, poll_ms=60_000).status == 503
    assert not store.pages.readers(store.database("shop").db_id), "every version is closed"


def test_answers_that_are_about_to_begin_count_as_under_way(
    store: Store, store_and_web: tuple[Store, WebServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hazard: concurrent requests all passed the check before the first of them was counted."""
    monkeypatch.setattr(routes, "STREAMS_MAX", 2)
    (part,) = [part for part in store_and_web[1]._web.parts if isinstance(part, routes.ReplicaPart)]
    with ExitStack() as readers:
        for _ in range(2):
            part._stream(readers.enter_context(store.pages.open("shop").open_snapshot()), (), _none, routes.BINARY)
        with pytest.raises(Overloaded):
            part._stream(readers.enter_context(store.pages.open("shop").open_snapshot()), (), _none, routes.BINARY)


def test_sent_bytes_are_counted(store: Store, admin: HttpClient) -> None:
    Pulled(_ask(admin))
    metrics = admin.request("GET", "/metrics").body.decode()
    assert f"quire_replica_pages_sent_total {len(_pages(store))}.0" in metrics


def test_varints_of_the_protocol() -> None:
    assert [varint(value).hex() for value in (0, 1, 127, 128, 300)] == ["00", "01", "7f", "8001", "ac02"]
