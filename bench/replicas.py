"""Embedded replicas: what catching up costs, against fetching the whole database.

A database of some ten thousand pages is changed a little, checkpointed and merged, as in days of use. Then a replica that was
away pulls. Counted are pages that differ (compared one by one), pages sent, bytes, and time; the whole pull is the other
contender, in turns with it. Both go through HTTP on loopback, to a server in this process.
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
from quire.service.replicas.protobuf import bytes_field, read_message

ROUNDS = 5
RATIOS = (0.001, 0.01, 0.1)
"""Of the rows that change while the replica is away."""


def catching_up(report: Report, directory: Path, quick: bool) -> None:
    """Pages and bytes sent, and time, for replicas that missed some changes."""
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
    """The pull of what changed and the pull of everything, in turns."""
    parts, wholes = [], []
    for _ in range(ROUNDS):
        parts.append(_pull(address, revision))
        wholes.append(_pull(address, ""))
    name = f"{ratio:.1%} of the rows"
    took = statistics.median(part[3] for part in parts) / statistics.median(every[3] for every in wholes)
    detail = f"{differing} pages differ, {parts[0][2]} sent, {size} in all"
    report.ratio(f"{name}: pages sent / pages that differ", parts[0][2] / differing, 1.5, "lower", detail)
    report.ratio(f"{name}: bytes / bytes of a whole pull", parts[0][1] / wholes[0][1], None, "lower")
    report.ratio(f"{name}: time / time of a whole pull", took, None, "lower")


def _pages(store: quire.Store) -> dict[int, bytes]:
    with store.pages.open("shop").open_snapshot() as reader:
        return dict(reader.scan())


def _pull(address: str, since: str) -> tuple[str, int, int, float]:
    """(revision, bytes, pages, seconds) of one pull."""
    parts = urlsplit(address)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=600)
    began = time.perf_counter()
    connection.request("POST", "/db/shop/pull-updates", bytes_field(3, since.encode()))
    body = connection.getresponse().read()
    took = time.perf_counter() - began
    connection.close()
    header = read_message(body[1 : 1 + body[0]])
    revision = header[1]
    assert isinstance(revision, bytes)
    return revision.decode(), len(body), len(body) // 4096, took


PARTS = (catching_up,)
