"""The tour's steps on real data: SQLite, versions, retention and the audit; a stream; a key-value database; Spark.

shop is a SQLite database whose pages live in the store. Each step is a function of the store.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from quire.cli.audit import WORDS
from quire.cli.checkpoint import result_text
from quire.cli.formatting import count_of, size, span
from quire.cli.gc import at_zero
from quire.cli.jobs import state_text, summary
from quire.cli.lookup import names_of
from quire.cli.tree import nodes_of
from quire.core.clock import SystemClock, moment
from quire.manifest.records import RetentionRecord
from quire.spark.sessions import session
from quire.stream.state import Retention

if TYPE_CHECKING:
    from quire.cli.tour import Guide
    from quire.store.store import Store

SHOP = "shop"
SNAPSHOT = "before"
FORK = "shop-experiment"
PRODUCTS = 20_000
CLICKS, SESSIONS = "clicks", "sessions"
RECORDS = 50_000
KEYS = 20_000
KEEP = 2
"""Snapshots without a name that the tour's policy keeps."""

CLOCK = SystemClock()

TABLE = "create table if not exists product(id integer primary key, name text not null, price real not null)"
MILK = "select price from product where name = 'milk'"
CHANGED = "select count(*) from (select * from product except select * from old.product)"


def sqlite(store: Store, guide: Guide) -> dict[str, Any]:
    """Write rows in transactions and keep them with a snapshot, while a reader is undisturbed."""
    guide.title("SQLite", "shop is a SQLite database; its pages live in the store")
    earlier = {snapshot.name: snapshot.snapshot_id for snapshot in store.manifest.snapshots.of(SHOP)}
    if SNAPSHOT in earlier:
        store.manifest.snapshots.drop(SHOP, earlier[SNAPSHOT])
    shop = store.sqlite(SHOP)
    try:
        began = CLOCK.monotonic()
        _fill(shop)
        write_ms = _since(began)
        pages = shop.execute("pragma page_count").get * shop.execute("pragma page_size").get
        guide.say(f"{PRODUCTS:,} rows, {size(pages)}, in one transaction: durable after {write_ms} ms")
        store.checkpoint(SHOP)
        began = CLOCK.monotonic()
        kept = store.snapshot(SHOP, SNAPSHOT, tags={"by": "tour"})
        snapshot_ms = _since(began)
        guide.say(f"snapshot shop@{SNAPSHOT} created in {snapshot_ms} ms: nothing is copied")
        changed = _raise_prices(store, shop, guide)
    finally:
        shop.close()
    return {
        "rows": PRODUCTS,
        "changed": changed,
        "write_ms": write_ms,
        "snapshot_ms": snapshot_ms,
        "snapshot_id": kept.snapshot_id,
    }


def _fill(shop: Any) -> None:
    dice = random.Random(1)
    rows = (("milk" if not n else f"product {n}", round(dice.uniform(1, 99), 2)) for n in range(PRODUCTS))
    with shop:
        shop.execute(TABLE)
        shop.execute("delete from product")
        shop.executemany("insert into product(name, price) values (?, ?)", rows)
        shop.execute("update product set price = 1.20 where name = 'milk'")


def _raise_prices(store: Store, shop: Any, guide: Guide) -> int:
    """Change rows while a reader is open, which continues to see the old ones."""
    reader = store.sqlite(SHOP)
    try:
        with reader:
            before = reader.execute(MILK).get
            shop.execute("update product set price = round(price * 1.1, 2) where id % 1000 = 1")
            changed: int = shop.changes()
            guide.say(f"{changed} prices raised: milk {shop.execute(MILK).get}; an open reader still sees {before}")
            assert reader.execute(MILK).get == before, "a reader saw a later transaction"
    finally:
        reader.close()
    return changed


def checkpoint(store: Store, guide: Guide) -> dict[str, Any]:
    """Turn the WAL into chunks with the job that `quire checkpoint shop` runs."""
    guide.title("Checkpoint", "the WAL becomes immutable chunks, or deltas over them")
    job = store.checkpoint(SHOP)
    guide.say(result_text(job, SHOP), "" if job.state.name == "SUCCEEDED" else "31")
    with store.manifest.read() as txn:
        chain = " + ".join(f"{link.kind.name.lower()}:{link.generation}" for link in txn.chain(job.db_id, 0))
    shop = store.sqlite(SHOP)
    guide.say(f"slot 0 is now {chain}; milk is {shop.execute(MILK).get}")
    shop.close()
    return {"job_id": job.job_id, "state": job.state.name.lower(), "result": job.result}


def branch(store: Store, guide: Guide) -> dict[str, Any]:
    """Fork at the snapshot and change the fork; read the old version; compare versions with SQL and with the manifest."""
    guide.title("Fork, time travel, compare", "a snapshot becomes a database; chunks are shared")
    began = CLOCK.monotonic()
    fork = store.sqlite(FORK, fork_of=SHOP, fork_at=SNAPSHOT)
    fork_ms = _since(began)
    fork.execute("update product set price = 0.99 where name = 'milk'")
    then = store.sqlite(SHOP, at=SNAPSHOT)
    now = store.sqlite(SHOP)
    try:
        prices = [connection.execute(MILK).get for connection in (then, now, fork)]
        guide.say(f"{FORK}, forked and opened in {fork_ms} ms, sells milk for {prices[2]}")
        guide.say(f"shop@{SNAPSHOT} for {prices[0]}, shop for {prices[1]}: three versions, read side by side")
        now.execute(f"attach 'file:{SHOP}?at={SNAPSHOT}' as old")
        rows = now.execute(CHANGED).get
        guide.say(f"SQL over both: {rows} rows of shop are not in shop@{SNAPSHOT}")
        sound = all(connection.execute("pragma integrity_check").get == "ok" for connection in (then, now, fork))
    finally:
        for connection in (then, now, fork):
            connection.close()
    difference = store.manifest.snapshots.diff(SHOP, SNAPSHOT)
    guide.say(f"the manifest: {count_of(difference.pages, 'page')} at most differ; no page was read")
    return {
        "fork": FORK,
        "milliseconds": fork_ms,
        "prices": prices,
        "rows": rows,
        "pages": difference.pages,
        "integrity": "ok" if sound else "damaged",
    }


def lineage(store: Store, guide: Guide) -> int:
    """Show the lineage of the databases."""
    guide.title("Lineage", "`quire tree`")
    roots = nodes_of(store.manifest)
    for root in roots:
        guide.tree(root)
    return len(roots)


def retention(store: Store, guide: Guide) -> dict[str, int]:
    """Set a policy, show its plan, and apply it."""
    guide.title("Retention", f"a policy for shop: named snapshots, and the newest {KEEP}")
    rules = store.manifest.retention
    rules.set(SHOP, RetentionRecord(keep_last=KEEP))
    for _ in range(KEEP):
        store.snapshot(SHOP)
    plan = rules.plan(SHOP)
    rows = [
        [
            str(decision.snapshot.snapshot_id),
            decision.snapshot.name or "-",
            moment(decision.snapshot.created_at_ms),
            "keep" if decision.keep else "drop",
            decision.why,
        ]
        for decision in plan.decisions
    ]
    guide.table([">id", "snapshot", "created", "verdict", "why"], rows)
    dropped = rules.apply(plan)
    guide.say(f"{count_of(len(dropped), 'snapshot')} dropped")
    return {"kept": len(plan.decisions) - len(dropped), "dropped": len(dropped)}


def collection(store: Store, guide: Guide) -> dict[str, int]:
    """Run a round of maintenance, as `quire gc` does, and show the jobs."""
    guide.title("Jobs", "unreferenced artifacts are deleted after a minute")
    store.maintain()
    now = CLOCK.now_ms()
    jobs = store.manifest.jobs.jobs()
    names = names_of(store.manifest, jobs[-4:])
    rows = [
        [str(job.job_id), job.kind.name.lower(), names.get(job.db_id, "-"), state_text(job), summary(job, now)]
        for job in jobs[-4:]
    ]
    guide.table([">id", "kind", "database", "state", "what"], rows)
    waiting = at_zero(store.manifest, int(store.settings.maintenance.delete_grace_seconds * 1000))
    number, total = waiting.total.artifacts, waiting.total.size_bytes
    if waiting.first:
        goes = f"the first is deleted in {span(max(waiting.first[0].due_at_ms - now, 0))}"
        guide.say(f"{count_of(number, 'artifact')} unreferenced, {size(total)}: {goes}")
    return {"jobs": len(jobs), "waiting": number, "waiting_bytes": total}


def audit(store: Store, guide: Guide) -> int:
    """Show the audit history of shop."""
    guide.title("Audit", "the history of shop, written by the transactions themselves")
    entries = store.manifest.audit(SHOP)
    rows = []
    for entry in entries[-4:]:
        action = entry.action.name.lower()
        rows.append([moment(entry.at_ms), WORDS.get(action, action), entry.subject or f"#{entry.number}"])
    guide.table(["when", "what", "subject"], rows)
    return len(entries)


def _since(began: float) -> float:
    return round((CLOCK.monotonic() - began) * 1000, 1)


# ── other engines ─────────────────────────────────────────────────────────────────────────────────────────────────────
def stream(store: Store, guide: Guide) -> dict[str, Any]:
    """Append records, compress them and move them to the object store, and read them back from there."""
    from pyarrow import array, binary, compute

    guide.title("Stream", f"{CLICKS} is a log of records, tiered to the object store")
    clicks = store.stream(CLICKS)
    clicks.retain(Retention(bytes=1))
    clicks.seal()
    retired = clicks.retire()  # what the last tour has left
    clicks.retain(None)
    dice = random.Random(2)
    lines = [f'{{"who": "u{dice.randrange(999):03}", "page": "/p/{dice.randrange(40)}"}}' for _ in range(RECORDS)]
    began = CLOCK.monotonic()
    first = clicks.append(array(lines, binary())).result()
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
    """Write a batch of pairs, take a snapshot, and scan a range in both versions."""
    guide.title("Key-value", f"{SESSIONS} maps bytes to bytes, in order")
    sessions = store.kv(SESSIONS)
    pairs: dict[bytes, bytes | None] = {b"u%05d" % n: b"cart of %d" % n for n in range(KEYS)}
    began = CLOCK.monotonic()
    sessions.write(pairs)
    write_ms = round((CLOCK.monotonic() - began) * 1000, 1)
    with sessions.snapshot() as before:
        sessions.write({b"u00001": None, b"u00002": b"empty"})
        kept, now = (sum(1 for _ in version.scan(prefix=b"u0000")) for version in (before, sessions))
    guide.say(f"{KEYS:,} pairs in one batch, durable after {write_ms} ms")
    guide.say(f"keys u0000…: {kept} in the snapshot, {now} after one was deleted")
    sessions.compact()
    return {"keys": KEYS, "write_ms": write_ms, "before": kept, "after": now}


def spark(store: Store, guide: Guide) -> dict[str, Any]:
    """Run jobs and queries on Spark: the same functions, on executors that read chunks themselves."""
    from quire.spark.access import options_of  # here: it loads Arrow

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
            [[total["database"], f"{total['rows']:,}", f"{total['sum']:,.2f}"] for total in totals],
        )
        old = {"database": SHOP, "from": SNAPSHOT, "table": "product"}
        began = CLOCK.monotonic()
        changed = engine.read.format("quire.rows").options(**here, **old).load().where("_op = 'update'").count()
        guide.say(f"rows that differ from {SHOP}@{SNAPSHOT}, found by comparing pages: {changed}, {_seconds(began)} s")
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
