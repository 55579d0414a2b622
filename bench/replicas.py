"""Embedded replicas: the cost of catching up, against fetching the whole database.

A database of some ten thousand pages is changed a little, checkpointed and merged, as in days of use. Then a replica that was
disconnected pulls the changes. Counted are the pages that differ (compared one by one), the pages sent, bytes, and time. The
opponent is a pull of the whole database, alternating with the other. Both go through HTTP on loopback, to a server in this
process.
"""

from __future__ import annotations

import http.client
import random
import statistics
import time
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import quire
from bench.report import Report

ROUNDS = 5
RATIOS = (0.001, 0.01, 0.1)
"""Shares of the rows that change while the replica is disconnected."""

CLIENT_REVISION, SERVER_REVISION = 3 << 3 | 2, 1 << 3 | 2
"""Keys of fields of the request and of the header of its answer: field number, and 2 for bytes with a length before them."""


def catching_up(report: Report, directory: Path, quick: bool) -> None:
    """Measure pages, bytes and time of pulls by replicas that missed some changes."""
    rows = 4_000 if quick else 40_000
    generator = random.Random(7)
    with (
        quire.open(directory / "replicas") as store,
        store.serve_http("127.0.0.1:0") as web,
        closing(store.sqlite("shop", create=True)) as connection,
    ):
        connection.execute("CREATE TABLE item(id INTEGER PRIMARY KEY, body)")
        with connection:
            connection.executemany("INSERT INTO item(body) VALUES (randomblob(?))", [(900,)] * rows)
        store.checkpoint("shop")
        for ratio in RATIOS:
            before, revision = _pages(store), _pull(web.address, "")[0]
            for _ in range(4):
                changed = [(number,) for number in generator.sample(range(1, rows + 1), int(rows * ratio / 4))]
                with connection:
                    connection.executemany("UPDATE item SET body = randomblob(900) WHERE id = ?", changed)
                store.checkpoint("shop")
            store.merge("shop")
            after = _pages(store)
            differing = sum(before.get(page) != image for page, image in after.items())
            _compare(report, web.address, revision, ratio, differing, len(after))


def _compare(report: Report, address: str, revision: str, ratio: float, differing: int, size: int) -> None:
    """Pull the changes and pull everything, alternating."""
    parts, wholes = [], []
    for _ in range(ROUNDS):
        parts.append(_pull(address, revision))
        wholes.append(_pull(address, ""))
    name = f"{ratio:.1%} of the rows"
    took = statistics.median(part[3] for part in parts) / statistics.median(whole[3] for whole in wholes)
    detail = f"{differing} pages differ, {parts[0][2]} sent, {size} in all"
    report.ratio(f"{name}: pages sent / pages that differ", parts[0][2] / differing, 1.5, "lower", detail)
    report.ratio(f"{name}: bytes / bytes of a whole pull", parts[0][1] / wholes[0][1], None, "lower")
    report.ratio(f"{name}: time / time of a whole pull", took, None, "lower")


def _pages(store: quire.Store) -> dict[int, bytes]:
    with store.pages.open("shop").open_snapshot() as reader:
        return dict(reader.scan())


def _pull(address: str, since: str) -> tuple[str, int, int, float]:
    """Pull once, and return (revision, bytes, pages, seconds). The messages are Turso's, in protobuf's wire format."""
    parts = urlsplit(address)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=600)
    began = time.perf_counter()
    request = bytes([CLIENT_REVISION, len(since)]) + since.encode()
    connection.request("POST", "/db/shop/pull-updates", request)
    body = connection.getresponse().read()
    took = time.perf_counter() - began
    connection.close()
    header = body[1 : 1 + body[0]]
    assert header[0] == SERVER_REVISION
    revision = header[2 : 2 + header[1]]
    return revision.decode(), len(body), len(body) // 4096, took


PARTS = (catching_up,)
