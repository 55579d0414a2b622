"""Live updates: they arrive, they are bounded, and a client that does not read is dropped."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from quire.core.errors import TooManyReaders
from quire.manifest.ops.base import Counter, ReserveIds
from quire.service.signed_tokens import create_token
from quire.service.web import hub as hubs
from quire.service.web.hub import CHANGES_MAX, QUEUE_MAX, Hub, Subscriber
from quire.service.web.server import WebServer
from quire.store.store import Store
from tests.service.web.http_client import Events, HttpClient, web_served


def wait_for_pages(web: WebServer, pages: int) -> None:
    deadline = time.monotonic() + 60
    while web.figures().pages_now != pages and time.monotonic() < deadline:
        time.sleep(0.02)
    assert web.figures().pages_now == pages


def test_a_change_arrives_with_its_operations_and_databases(anonymous: HttpClient, store: Store) -> None:
    page = Events(anonymous)
    try:
        assert (page.status, page.headers["content-type"]) == (200, "text/event-stream")
        assert page.until("hello")["head"] == store.feed.head()
        store.create("shop", "pages")
        update = page.until("changes")
        change = update["changes"][-1]
        assert change["kinds"] == {"RegisterDb": 1}
        assert change["databases"] == ["shop"]
        assert (change["sequence"], update["head"], update["skipped"]) == (store.feed.head(), store.feed.head(), 0)
    finally:
        page.close()


def test_a_change_before_the_hub_follows_the_feed_arrives(
    anonymous: HttpClient, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    follow = hubs.Hub._follow

    def late(hub: hubs.Hub) -> None:
        store.create("shop", "pages")
        follow(hub)

    monkeypatch.setattr(hubs.Hub, "_follow", late)
    page = Events(anonymous)
    try:
        assert page.next()[0] == "hello"
        name, response = page.next()
        assert name == "changes", "not a heartbeat"
        assert response["changes"][-1]["databases"] == ["shop"]
    finally:
        page.close()


def test_an_idle_store_sends_heartbeats(anonymous: HttpClient, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hubs, "BEAT_SECONDS", 0.1)
    page = Events(anonymous)
    try:
        assert page.until("beat")["head"] == store.feed.head()
    finally:
        page.close()


def test_live_updates_go_on_after_an_error(
    anonymous: HttpClient, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hazard: the hub ended for good when the store had no reader slot for a moment: no page had live updates any more."""
    make_round, errors = Hub._round, [TooManyReaders("all reader slots are in use")]

    def fail_once(hub: Hub, seen: int, head: int) -> dict[str, Any]:
        if errors:
            raise errors.pop()
        return make_round(hub, seen, head)

    monkeypatch.setattr(Hub, "_round", fail_once)
    first = Events(anonymous)
    try:
        first.until("hello")
        store.create("shop", "pages")
        while first.next()[0]:
            pass  # until the stream ends: the page reconnects
    finally:
        first.close()
    second = Events(anonymous)
    try:
        second.until("hello")
        store.create("cart", "pages")
        assert second.until("changes")["changes"][-1]["databases"] == ["cart"]
    finally:
        second.close()


def test_live_updates_end_when_their_token_expires(
    web: WebServer, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hazard: a page that was open when its token expired went on receiving every change."""
    monkeypatch.setattr(hubs, "BEAT_SECONDS", 0.1)
    page = Events(HttpClient(web.address, create_token(store.path, [], read_only=True, ttl_seconds=2)))
    try:
        assert page.until("hello")["head"] == store.feed.head()
        wait_for_pages(web, 1)
        wait_for_pages(web, 0)
    finally:
        page.close()


def test_a_burst_is_sent_in_few_bounded_updates(anonymous: HttpClient, store: Store) -> None:
    page = Events(anonymous)
    try:
        page.until("hello")
        head = store.feed.head()
        guards = [store.manifest.submit([ReserveIds(Counter.JOB, 10_000 + number)]) for number in range(400)]
        for guard in guards:
            guard.result()
        rounds = received = 0
        while received < 400:
            response = page.until("changes")
            rounds += 1
            assert len(response["changes"]) <= CHANGES_MAX
            sequences = [change["sequence"] for change in response["changes"]]
            assert sequences == list(range(response["head"] - len(sequences) + 1, response["head"] + 1))
            received += response["skipped"] + len(sequences)
        assert head + received == store.feed.head()
        assert rounds < 100
    finally:
        page.close()


def test_subscribers_are_limited_and_a_page_that_leaves_frees_its_slot(path: Path) -> None:
    with web_served(path, http_events_max=2) as (store, web):
        client = HttpClient(web.address)
        pages = [Events(client), Events(client)]
        wait_for_pages(web, 2)
        refused = Events(client)
        assert refused.status == 503
        assert web.figures().limited == {"events": 1}
        refused.close()
        pages.pop().close()
        wait_for_pages_by_writing(web, store, 1)
        reconnected = Events(client)
        assert reconnected.status == 200
        for stream in (*pages, reconnected):
            stream.close()


def test_a_page_that_does_not_read_is_dropped_and_the_others_go_on(
    anonymous: HttpClient, web: WebServer, store: Store
) -> None:
    slow, quick = Events(anonymous), Events(anonymous)
    done = threading.Event()

    def read() -> None:
        while not done.is_set() and quick.next()[0]:
            pass

    reader = threading.Thread(target=read)
    reader.start()
    try:
        wait_for_pages(web, 2)
        hub = web._web.hub
        bulk = {"changes": ["x" * 1000] * 200}
        while not web.figures().pages_dropped:
            hub._broadcast("changes", bulk)
            time.sleep(0.02)
        assert web.figures().pages_dropped == 1
        wait_for_pages(web, 1)
        assert store.feed.head() == 0 or anonymous.get("/healthz").status == 200
    finally:
        done.set()
        web.close()
        reader.join(60)
        slow.close()
        quick.close()


def test_a_full_queue_drops_its_subscriber() -> None:
    subscriber = Subscriber()
    assert [subscriber.push(b"x") for _ in range(QUEUE_MAX + 1)] == [True] * QUEUE_MAX + [False]
    assert subscriber.take() is None
    assert subscriber.dropped


def test_closing_ends_the_updates_and_the_hubs_thread(path: Path) -> None:
    with web_served(path) as (_, web):
        page = Events(HttpClient(web.address))
        page.until("hello")
        started = time.monotonic()
        web.close()
        assert time.monotonic() - started < 3
        while page.next()[0]:
            pass
        page.close()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("quire-web")]


def test_without_subscribers_the_feed_is_not_read(web: WebServer, store: Store) -> None:
    hub: Hub = web._web.hub
    assert hub._thread is None
    page = Events(HttpClient(web.address))
    page.until("hello")
    page.close()
    store.create("shop", "pages")  # the server tries to send it, and notices that the page is gone
    store.create("shop2", "pages")
    wait_for_pages_by_writing(web, store, 0)
    assert hub._thread is not None


def wait_for_pages_by_writing(web: WebServer, store: Store, pages: int) -> None:
    """The server notices that a page has left when it next sends something."""
    number = 500
    while web.figures().pages_now != pages:
        number += 1
        store.manifest.submit([ReserveIds(Counter.JOB, number)]).result()
        time.sleep(0.05)
