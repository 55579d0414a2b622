"""Cold reads from S3 through the VFS: only the data that a query touches is fetched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import apsw

from quire.durable.files import OsDisk
from quire.objects.api import ObjectStore, list_objects
from quire.objects.open import open_store
from quire.pages.cache import PageCache
from quire.pages.sources import Sources
from quire.sqlite.files import open_reader
from quire.store.store import Store
from tests.objects.conftest import _proxy, fresh_url, proxy, s3_options, s3_server
from tests.objects.proxy import FaultyProxy

__all__ = ["_proxy", "proxy", "s3_server"]  # fixtures

ROWS = 3_000


def fetched(endpoint: FaultyProxy) -> list[int]:
    """The sizes of the ranged reads so far."""
    ranges = [
        request.headers["range"]
        for request in endpoint.requests(lambda request: request.method == "GET" and "range" in request.headers)
    ]
    spans = [text.removeprefix("bytes=").split("-") for text in ranges]
    return [int(last) - int(first) + 1 for first, last in spans]


def cold(store: Store, target: ObjectStore, url: str) -> Callable[[], apsw.Connection]:
    """Copy the objects of a snapshot to S3. Returns a function that connects to it without anything in memory."""
    local = open_store(store.objects_url)
    for info in list_objects(local):
        target.put(info.key, local.get(info.key))
    view = store.pages.view("shop", "cold")
    assert not view.pins, "everything is in chunks"
    remote = replace(view, spaces=tuple((url, prefix) for _, prefix in view.spaces))

    def connect() -> apsw.Connection:
        sources = Sources(root="", disk=OsDisk(), open_store=lambda _: target, cache=PageCache(8 << 20))
        return open_reader(remote.open(sources))

    return connect


def test_a_query_on_s3_fetches_what_it_touches(
    store: Store, shop: apsw.Connection, proxy: FaultyProxy, tmp_path: Path
) -> None:
    shop.execute("create table big(id integer primary key, b blob)")
    with shop:
        shop.executemany("insert into big values (?, randomblob(2000))", ((number,) for number in range(ROWS)))
    store.checkpoint("shop")
    store.snapshot("shop", "cold")
    url = fresh_url()
    target = open_store(url, options=s3_options(proxy.endpoint))
    connect = cold(store, target, url)
    proxy.reset()
    connection = connect()
    assert connection.execute("select length(b) from big where id = 1234").get == 2000
    reads = fetched(proxy)
    assert len(reads) <= 6, "the footer, and a frame for each of the few pages"
    assert sum(reads) < 600_000, "of six million"
    connection.execute("select length(b) from big where id = 1234").get  # noqa: B018 - reads
    assert fetched(proxy) == reads, "nothing is fetched twice"
    assert connection.execute("select count(*), sum(length(b)) from big where id < 200").get == (200, 400_000)
    connection.close()
    target.close()
