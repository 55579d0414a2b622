"""The tour's chapter about the other engines, and the one about Spark.

Streams and key-value databases are real here as well: what is said was read back. Each step is a function of the store.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from quire.cli.formatting import count_of, size
from quire.cli.tour_versions import FORK, SHOP, SNAPSHOT
from quire.core.clock import SystemClock
from quire.spark.access import options_of
from quire.spark.sessions import session
from quire.stream.state import Retention

if TYPE_CHECKING:
    from quire.cli.tour_guide import Guide
    from quire.store.store import Store

CLICKS, SESSIONS = "clicks", "sessions"
RECORDS = 50_000
KEYS = 20_000

CLOCK = SystemClock()


def stream(store: Store, guide: Guide) -> dict[str, Any]:
    """Records in one append, read back, then compressed and moved to the object store, and read again."""
    import pyarrow as pa
    from pyarrow import compute

    guide.title("Stream", f"{CLICKS} is a log of records, tiered to the object store")
    clicks = store.stream(CLICKS)
    clicks.retain(Retention(bytes=1))
    clicks.seal()
    retired = clicks.retire()  # what the last tour left
    clicks.retain(None)
    dice = random.Random(2)
    lines = [f'{{"who": "u{dice.randrange(999):03}", "page": "/p/{dice.randrange(40)}"}}' for _ in range(RECORDS)]
    began = CLOCK.monotonic()
    first = clicks.append(pa.array(lines, pa.binary())).result()
    seconds = CLOCK.monotonic() - began
    guide.say(f"{RECORDS:,} records, durable after {seconds * 1000:.0f} ms: {round(RECORDS / seconds):,} per second")
    clicks.seal()
    clicks.compress()
    clicks.upload()
    clicks.evict()
    info = clicks.info()
    read = sum(
        compute.sum(compute.binary_length(batch.column("payload"))).as_py() for batch in clicks.read_batches(first)
    )
    assert read == sum(map(len, lines)), "records read back are not those that were appended"
    guide.say(f"read back from the object store: {size(read)}; {count_of(retired, 'segment')} of earlier tours retired")
    return {"records": RECORDS, "seconds": round(seconds, 4), "bytes": read, "segments": info.segments}


def key_values(store: Store, guide: Guide) -> dict[str, Any]:
    """A batch of pairs, a snapshot, a range."""
    guide.title("Key-value", f"{SESSIONS} maps bytes to bytes, in order")
    sessions = store.kv(SESSIONS)
    pairs: dict[bytes, bytes | None] = {b"u%05d" % n: b"cart of %d" % n for n in range(KEYS)}
    began = CLOCK.monotonic()
    sessions.write(pairs)
    write_ms = round((CLOCK.monotonic() - began) * 1000, 1)
    with sessions.snapshot() as before:
        sessions.write({b"u00001": None, b"u00002": b"empty"})
        kept, now = (sum(1 for _ in each.scan(prefix=b"u0000")) for each in (before, sessions))
    guide.say(f"{KEYS:,} pairs in one batch, durable after {write_ms} ms")
    guide.say(f"keys u0000…: {kept} in the snapshot, {now} after one was deleted")
    sessions.compact()
    return {"keys": KEYS, "write_ms": write_ms, "before": kept, "after": now}


def spark(store: Store, guide: Guide) -> dict[str, Any]:
    """Jobs and queries on Spark: the same functions, on executors that read chunks by themselves."""
    guide.title("Spark", "jobs and queries on executors, which read chunks by themselves")
    began = CLOCK.monotonic()
    engine = session(memory="1g")
    guide.say(f"Spark {engine.version}, {engine.conf.get('spark.master')}: up after {_seconds(began)} s")
    try:
        began = CLOCK.monotonic()
        jobs = store.heavy.checkpoint_all([SHOP, FORK], runner="spark")
        guide.say(f"{SHOP} and {FORK} checkpointed in one run, {_seconds(began)} s")
        here = options_of(store)
        began = CLOCK.monotonic()
        products = engine.read.format("quire.sqlite").options(**here, databases=f"{SHOP}*", table="product").load()
        rows = products.groupBy("_database").agg({"price": "sum", "id": "count"}).orderBy("_database").collect()
        guide.say(f"products of {count_of(len(rows), 'database')}, scanned by executors in {_seconds(began)} s")
        totals = [{"database": row[0], "rows": row["count(id)"], "sum": round(row["sum(price)"], 2)} for row in rows]
        guide.table(
            ["database", ">products", ">sum of prices"],
            [[each["database"], f"{each['rows']:,}", f"{each['sum']:,.2f}"] for each in totals],
        )
        old = {"database": SHOP, "from": SNAPSHOT, "table": "product"}
        began = CLOCK.monotonic()
        changed = (
            engine.read.format("quire.diff").options(**here, **old).load().where("_change = 'update_after'").count()
        )
        guide.say(f"rows that differ from {SHOP}@{SNAPSHOT}, by the pages that do: {changed}, {_seconds(began)} s")
        began = CLOCK.monotonic()
        verified = store.heavy.verify(runner="spark")
        guide.say(f"every byte of every object read and compared: {verified.state.name.lower()}, {_seconds(began)} s")
    finally:
        engine.stop()
    return {
        "checkpoints": [job.state.name.lower() for job in jobs],
        "totals": totals,
        "changed": changed,
        "verify": verified.result,
    }


def _seconds(began: float) -> str:
    return f"{CLOCK.monotonic() - began:.1f}"
