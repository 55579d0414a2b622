"""Live updates: they arrive, they are bounded, and who does not read is dropped."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from quire.manifest.ops.base import Counter, ReserveIds
from quire.service.web import hub as hubs
from quire.service.web.hub import CHANGES_MAX, QUEUE_MAX, Hub, Subscriber
from quire.service.web.server import WebServer
from quire.store.store import Store
from tests.service.web.world import Asker, Events, web_served


def settle(web: WebServer, pages: int) -> None:
    deadline = time.monotonic() + 60
    while web.figures().pages_now != pages and time.monotonic() < deadline:
        time.sleep(0.02)
    assert web.figures().pages_now == pages


def test_a_change_arrives_with_what_it_did_and_to_whom(anybody: Asker, store: Store) -> None:
    page = Events(anybody)
    try:
        assert (page.status, page.headers["content-type"]) == (200, "text/event-stream")
        assert page.until("hello")["head"] == store.feed.head()
        store.create("shop", "pages")
        told = page.until("changes")
        made = told["changes"][-1]
        assert made["kinds"] == {"RegisterDb": 1}
        assert made["databases"] == ["shop"]
        assert (made["sequence"], told["head"], told["skipped"]) == (store.feed.head(), store.feed.head(), 0)
    finally:
        page.close()


def test_a_change_before_the_hub_has_begun_to_follow_arrives(
    anybody: Asker, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    follow = hubs.Hub._follow

    def late(hub: hubs.Hub) -> None:
        store.create("shop", "pages")
        follow(hub)

    monkeypatch.setattr(hubs.Hub, "_follow", late)
    page = Events(anybody)
    try:
        assert page.next()[0] == "hello"
        name, told = page.next()
        assert name == "changes", "not a beat"
        assert told["changes"][-1]["databases"] == ["shop"]
    finally:
        page.close()


def test_a_quiet_store_still_beats(anybody: Asker, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hubs, "BEAT_SECONDS", 0.1)
    page = Events(anybody)
    try:
        assert page.until("beat")["head"] == store.feed.head()
    finally:
        page.close()


def test_a_burst_is_told_in_few_bounded_rounds(anybody: Asker, store: Store) -> None:
    page = Events(anybody)
    try:
        page.until("hello")
        head = store.feed.head()
        guards = [store.manifest.submit([ReserveIds(Counter.JOB, 10_000 + each)]) for each in range(400)]
        for each in guards:
            each.result()
        rounds = seen = 0
        while seen < 400:
            told = page.until("changes")
            rounds += 1
            assert len(told["changes"]) <= CHANGES_MAX
            sequences = [each["sequence"] for each in told["changes"]]
            assert sequences == list(range(told["head"] - len(sequences) + 1, told["head"] + 1))
            seen += told["skipped"] + len(sequences)
        assert head + seen == store.feed.head()
        assert rounds < 100
    finally:
        page.close()


def test_there_are_so_many_places_and_a_page_that_leaves_gives_its_back(path: Path) -> None:
    with web_served(path, http_events_max=2) as (store, web):
        asker = Asker(web.address)
        pages = [Events(asker), Events(asker)]
        settle(web, 2)
        refused = Events(asker)
        assert refused.status == 503
        assert web.figures().limited == {"events": 1}
        refused.close()
        pages.pop().close()
        settle_by_writing(web, store, 1)
        again = Events(asker)
        assert again.status == 200
        for each in (*pages, again):
            each.close()


def test_a_page_that_does_not_read_is_dropped_and_the_others_go_on(
    anybody: Asker, web: WebServer, store: Store
) -> None:
    slow, quick = Events(anybody), Events(anybody)
    done = threading.Event()

    def read() -> None:
        while not done.is_set() and quick.next()[0]:
            pass

    reader = threading.Thread(target=read)
    reader.start()
    try:
        settle(web, 2)
        hub = web._web.hub
        bulk = {"changes": ["x" * 1000] * 200}
        while not web.figures().pages_dropped:
            hub._tell("changes", bulk)
            time.sleep(0.02)
        assert web.figures().pages_dropped == 1
        settle(web, 1)
        assert store.feed.head() == 0 or anybody.get("/healthz").status == 200
    finally:
        done.set()
        web.close()
        reader.join(60)
        slow.close()
        quick.close()


def test_a_full_queue_ends_a_place() -> None:
    place = Subscriber()
    assert [place.tell(b"x") for _ in range(QUEUE_MAX + 1)] == [True] * QUEUE_MAX + [False]
    assert place.take() is None
    assert place.dropped


def test_closing_ends_the_updates_and_the_hubs_thread(path: Path) -> None:
    with web_served(path) as (_, web):
        page = Events(Asker(web.address))
        page.until("hello")
        began = time.monotonic()
        web.close()
        assert time.monotonic() - began < 3
        while page.next()[0]:
            pass
        page.close()
    assert not [each.name for each in threading.enumerate() if each.name.startswith("quire-web")]


def test_nobody_listens_and_nothing_is_looked_at(web: WebServer, store: Store) -> None:
    hub: Hub = web._web.hub
    assert hub._thread is None
    page = Events(Asker(web.address))
    page.until("hello")
    page.close()
    store.create("shop", "pages")  # which the server tries to tell, and notices that the page is gone
    store.create("shop2", "pages")
    settle_by_writing(web, store, 0)
    assert hub._thread is not None


def settle_by_writing(web: WebServer, store: Store, pages: int) -> None:
    """The server notices that a page has left when it next sends something."""
    number = 500
    while web.figures().pages_now != pages:
        number += 1
        store.manifest.submit([ReserveIds(Counter.JOB, number)]).result()
        time.sleep(0.05)
