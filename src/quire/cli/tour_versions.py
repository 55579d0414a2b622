"""The tour's chapter about versions: pages, snapshots, a checkpoint, a fork, retention, jobs, the collector, the audit.

Here the bytes are real: shop is a page database that its engine has opened. Each step is a function of the store.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quire.cli.plain import count_of, moment, size, span
from quire.core.clock import SystemClock

if TYPE_CHECKING:
    from quire.cli.tour_guide import Guide
    from quire.pages.pagestore import PageStore
    from quire.store.store import Store

SHOP = "shop"
SNAPSHOT = "before"
FORK = "shop-experiment"
PAGES = 256
CHANGED = 8
KEEP = 2
"""Snapshots without a name that the tour's policy keeps."""

CLOCK = SystemClock()


def pages(store: Store, guide: Guide) -> dict[str, Any]:
    """Transactions write pages, a snapshot keeps them, a reader is never disturbed."""
    guide.title("Pages", "shop is a page database: transactions, versions, a write-ahead log")
    earlier = {each.name: each.snapshot_id for each in store.manifest.snapshots.of(SHOP)}
    if SNAPSHOT in earlier:
        store.manifest.snapshots.drop(SHOP, earlier[SNAPSHOT])
    shop = store.pages.open(SHOP)
    began = CLOCK.monotonic()
    _write(shop, range(PAGES), "milk 1.20")
    write_ms = _since(began)
    guide.say(f"{PAGES} pages, {size(PAGES * shop.page_size)}, in one transaction: durable after {write_ms} ms")
    store.checkpoint(SHOP)
    began = CLOCK.monotonic()
    kept = store.snapshot(SHOP, SNAPSHOT, tags={"made by": "quire tour"})
    snapshot_ms = _since(began)
    guide.say(f"shop@{SNAPSHOT} keeps it, after {snapshot_ms} ms: nothing is copied")
    with shop.open_snapshot() as reader:
        _write(shop, range(CHANGED), "milk 1.35")
        guide.say(f"{CHANGED} pages changed; a reader from before still sees {_text(reader.read_page(0))!r}")
    return {
        "pages": PAGES,
        "changed": CHANGED,
        "write_ms": write_ms,
        "snapshot_ms": snapshot_ms,
        "snapshot_id": kept.snapshot_id,
    }


def checkpoint(store: Store, guide: Guide) -> dict[str, Any]:
    """The WAL becomes chunks: a job, which is what `quire checkpoint shop` runs."""
    from quire.cli.checkpoint import sentence

    guide.title("Checkpoint", "what is in the log becomes immutable chunks, or deltas over them")
    job = store.checkpoint(SHOP)
    guide.say(sentence(job, SHOP), "" if job.state.name == "SUCCEEDED" else "red")
    with store.manifest.read() as txn:
        chain = " + ".join(f"{link.kind.name.lower()}:{link.generation}" for link in txn.chain(job.db_id, 0))
    with store.pages.open(SHOP).open_snapshot() as reader:
        guide.say(f"slot 0 is now {chain}, and page 0 of it reads {_text(reader.read_page(0))!r}")
    return {"job_id": job.job_id, "state": job.state.name.lower(), "result": job.result}


def branch(store: Store, guide: Guide) -> dict[str, Any]:
    """A fork at the snapshot: the way to read, and to change, what was. Then what differs."""
    guide.title("Fork and diff", "a snapshot as a database of its own, which shares its chunks")
    began = CLOCK.monotonic()
    store.fork(SHOP, FORK, at=SNAPSHOT)
    fork_ms = _since(began)
    then = store.pages.open(FORK)
    with then.open_snapshot() as reader:
        guide.say(f"{FORK}, after {fork_ms} ms: its page 0 reads {_text(reader.read_page(0))!r}")
    _write(then, [1], "milk 0.99")
    with store.pages.open(SHOP).open_snapshot() as reader:
        guide.say(f"it writes page 1; in shop that one still reads {_text(reader.read_page(1))!r}")
    found = store.manifest.snapshots.diff(SHOP, SNAPSHOT)
    guide.say(f"shop@{SNAPSHOT} and shop differ in {count_of(found.pages, 'page')} at most: no page was read for that")
    return {"fork": FORK, "milliseconds": fork_ms, "slots": len(found.slots), "pages": found.pages}


def lineage(store: Store, guide: Guide) -> int:
    """Who came from whom."""
    from quire.cli.tree import nodes_of

    guide.title("Lineage", "`quire tree`")
    roots = nodes_of(store.manifest)
    for root in roots:
        guide.tree(root)
    return len(roots)


def retention(store: Store, guide: Guide) -> dict[str, int]:
    """A policy, what it would do, and that done."""
    from quire.manifest.records import RetentionRecord

    guide.title("Retention", f"a policy for shop: what a person named, and the newest {KEEP}")
    rules = store.manifest.retention
    rules.set(SHOP, RetentionRecord(keep_last=KEEP))
    for _ in range(KEEP):
        store.snapshot(SHOP)
    plan = rules.plan(SHOP)
    rows = [
        [
            str(each.snapshot.snapshot_id),
            each.snapshot.name or "-",
            moment(each.snapshot.created_at_ms),
            "keep" if each.keep else "drop",
            each.why,
        ]
        for each in plan.decisions
    ]
    guide.table([">id", "snapshot", "created", "verdict", "why"], rows)
    dropped = rules.apply(plan)
    guide.say(f"{count_of(len(dropped), 'snapshot')} dropped")
    return {"kept": len(plan.decisions) - len(dropped), "dropped": len(dropped)}


def collection(store: Store, guide: Guide) -> dict[str, int]:
    """A round of maintenance, as `quire gc` does it, and the jobs there are."""
    from quire.cli.gc import at_zero
    from quire.cli.jobs import state_text, summary
    from quire.cli.named import names_of

    guide.title("Jobs and the collector", "what nobody refers to any more goes a minute later")
    store.maintain()
    now = CLOCK.now_ms()
    with store.manifest.read() as txn:
        names = names_of(txn)
    jobs = store.manifest.jobs.jobs()
    rows = [
        [str(each.job_id), each.kind.name.lower(), names.get(each.db_id, "-"), state_text(each), summary(each, now)]
        for each in jobs[-4:]
    ]
    guide.table([">id", "kind", "database", "state", "what"], rows)
    waiting = at_zero(store.manifest, int(store.settings.maintenance.delete_grace_seconds * 1000))
    total = sum(each.size_bytes for each in waiting)
    if waiting:
        goes = f"the first goes in {span(max(waiting[0].due_at_ms - now, 0))}"
        guide.say(f"{count_of(len(waiting), 'artifact')} at zero, {size(total)}: {goes}")
    return {"jobs": len(jobs), "waiting": len(waiting), "waiting_bytes": total}


def audit(store: Store, guide: Guide) -> int:
    """What happened to shop, for people who ask later."""
    from quire.cli.audit import WORDS

    guide.title("Audit", "what happened, written by the transaction that did it")
    found = store.manifest.audit(SHOP)
    rows = []
    for each in found[-4:]:
        action = each.action.name.lower()
        rows.append([moment(each.at_ms), WORDS.get(action, action), each.subject or f"#{each.number}"])
    guide.table(["when", "what", "subject"], rows)
    return len(found)


def _write(database: PageStore, numbers: Any, text: str) -> None:
    image = text.encode().ljust(database.page_size, b"\0")
    with database.begin() as transaction:
        for number in numbers:
            transaction.write_page(number, image)


def _text(page: bytes) -> str:
    return page.rstrip(b"\0").decode()


def _since(began: float) -> float:
    return round((CLOCK.monotonic() - began) * 1000, 1)
