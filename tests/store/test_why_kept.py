"""`why` names what keeps an object that nothing refers to any more: a query, a user's request, archived moments."""

from __future__ import annotations

from pathlib import Path

import quire
from quire.core.ids import ArtifactKey, ArtifactKind
from quire.core.settings import MaintenanceSettings, StoreSettings
from quire.durable.names import object_key
from quire.manifest import tables as t
from quire.pages.anchors import lend
from quire.store.store import Store
from quire.store.why import why
from quire.testing.clock import ManualClock
from tests.archive.archived_store import archived_store

GRACE_SECONDS = 60.0


def written(store: Store, name: str = "shop") -> ArtifactKey:
    """Write a database and return its only chunk."""
    with store.sqlite(name, create=True) as connection:
        connection.execute("create table if not exists t(a)")
        connection.execute("insert into t values (randomblob(2000))")
    store.checkpoint(name)
    with store.manifest.read() as txn:
        ((origin, slot, generation), _) = list(txn.scan(t.CHUNK_CATALOG))[-1]
    return ArtifactKey(origin, ArtifactKind.BASE, slot, generation)


def holders(store: Store, subject: str) -> list[tuple[str, str]]:
    with store.manifest.read() as txn:
        return [(holder.kind, holder.release) for holder in why(txn, subject).holders]


def test_a_lent_version_and_a_user_keep_what_nothing_refers_to(tmp_path: Path) -> None:
    """Hazard: the next `quire gc` was said to delete it; it did not, as long as a query or `gc --keep` kept it."""
    clock = ManualClock()
    settings = StoreSettings(maintenance=MaintenanceSettings(enabled=False, delete_grace_seconds=GRACE_SECONDS))
    with quire.open(tmp_path, settings=settings, clock=clock) as store:
        chunk = written(store)
        store.fork("shop", "branch")
        store.manifest.jobs.keep_until(chunk, clock.now_ms() + 86_400_000).result()
        lease_id, _ = lend(store.pages, ["branch"], 3600.0)
        store.drop("shop")
        written(store, "branch")
        store.merge("branch")
        store.maintain()
        keep = f"then, or quire gc --keep {object_key(chunk)} --until 0"
        reader, gc = "some minutes after its last read", "then the next `quire gc`, or maintenance"
        assert holders(store, object_key(chunk)) == [("time", keep), ("reader", reader), ("time", gc)]
        store.manifest.jobs.keep_until(chunk, 0).result()
        assert holders(store, object_key(chunk)) == [("reader", reader), ("time", gc)]
        store.manifest.leases.release(lease_id)
        assert holders(store, object_key(chunk)) == [("time", "the next `quire gc`, or maintenance")]


def test_an_object_that_archived_moments_need_is_explained(tmp_path: Path) -> None:
    """Hazard: it had no row, and was said to be an orphan that `quire verify --sweep` deletes."""
    clock = ManualClock()
    with archived_store(tmp_path, clock=clock) as archived:
        store = archived.store
        chunk = written(store)
        with store.manifest.read() as txn:
            name = f"{txn.object_prefixes()[0]}/{object_key(chunk)}"
        archived.wait_archived()
        store.drop("shop")
        for _round in range(3):
            clock.advance(3600)
            store.maintain()
        with store.manifest.read() as txn:
            assert txn.artifact(chunk) is None
            for subject in (name, f"objects/{name}"):
                explanation = why(txn, subject)
                (holder,) = explanation.holders
                assert (explanation.kind, holder.kind, holder.name) == ("base", "time", "archive")
                assert explanation.state.startswith("retired ")
