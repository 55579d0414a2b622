"""The clock is set back: an object that is retired after an archived moment stays as long as that moment (A8)."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.archive.window import reach
from quire.core.errors import ObjectStoreUnavailable
from quire.manifest.namespaces import retired_objects
from quire.store.heavy import audit_bucket
from quire.store.restoring import restore
from quire.store.store import Store
from tests.archive.test_window import HOUR, WindowedStore, new_base, retired_names, value_of, write


@pytest.fixture
def windowed(tmp_path: Path) -> WindowedStore:
    return WindowedStore(tmp_path)


def archive_moment(windowed: WindowedStore, store: Store) -> int:
    """Archive an hour of moments of the value 1; return the last one. No commit of the manifest has its time."""
    write(store, 1)
    for _ in range(5):
        windowed.clock.advance(120)
        store.maintain()
        store.worker.drain()
    new_base(store)
    windowed.clock.advance(HOUR)
    new_base(store)
    windowed.clock.advance(60)
    store.kv("ticks").put(b"key", b"value")
    assert store.archive is not None
    store.archive.wait(10)
    return windowed.clock.now_ms()


def replace_value(windowed: WindowedStore, store: Store) -> None:
    """Write the value 2 and retire the objects of the value 1."""
    write(store, 2)
    windowed.clock.advance(120)
    for _ in range(180):
        windowed.clock.advance(60)
        store.maintain()
        store.worker.drain()
        if retired_names(store):
            break
    assert retired_names(store)
    assert store.archive is not None
    store.archive.wait(10)


def require_sound(windowed: WindowedStore, store: Store, moment: int) -> None:
    """Check the moment, and every other one, shortly before it leaves the window."""
    with store.manifest.read() as txn:
        assert all(row.since_ms >= moment for _, row in retired_objects(txn))
    windowed.clock.advance((moment + 2 * HOUR * 1000 - 30_000 - windowed.clock.now_ms()) / 1000)
    store._parts.window.look(now=True)
    assert reach(store.objects, store.info().store_id).oldest_at_ms < moment
    assert audit_bucket(windowed.bucket).problems == []
    assert value_of(windowed.restored(moment - 1000)) == 1  # later ones have the time of the last moment, too


def test_what_is_retired_after_a_moment_stays_for_it(windowed: WindowedStore) -> None:
    with windowed.open() as store:
        moment = archive_moment(windowed, store)
        windowed.clock.jump(-1.5 * HOUR)
        replace_value(windowed, store)
        require_sound(windowed, store, moment)


def test_what_is_retired_after_a_restart_stays_for_the_moments_before_it(windowed: WindowedStore) -> None:
    with windowed.open() as store:
        moment = archive_moment(windowed, store)
    (windowed.path / "store" / "archive.json").unlink()  # as after a crash
    windowed.clock.jump(-1.5 * HOUR)
    with windowed.open() as store:
        replace_value(windowed, store)
        require_sound(windowed, store, moment)


def test_what_an_owner_with_a_slow_clock_retires_stays_for_the_moments_of_the_owner_before_it(
    windowed: WindowedStore,
) -> None:
    with windowed.open() as store:
        moment = archive_moment(windowed, store)
    windowed.clock.jump(-1.5 * HOUR)
    restore(windowed.bucket, windowed.path / "second", takeover=True, clock=windowed.clock)
    (windowed.path / "store").rename(windowed.path / "first")
    (windowed.path / "second").rename(windowed.path / "store")
    with windowed.open() as store:
        replace_value(windowed, store)
        require_sound(windowed, store, moment)


def test_nothing_is_retired_until_the_last_moment_is_known(
    windowed: WindowedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with windowed.open() as store:
        moment = archive_moment(windowed, store)
        name = next(iter(windowed.objects("e/")))
    (windowed.path / "store" / "archive.json").unlink()
    windowed.clock.jump(-1.5 * HOUR)

    def without_answer(*_: object) -> None:
        raise ObjectStoreUnavailable("away")

    with monkeypatch.context() as patched:
        patched.setattr("quire.archive.archiver.end_of_log", without_answer)
        patched.setattr("quire.archive.archiver.END_SECONDS", 0.05)
        store = windowed.open()
        with pytest.raises(ObjectStoreUnavailable, match="has not responded"):
            store.context.collector.delete(store.objects_url, [name])
    with store:
        store.context.collector.delete(store.objects_url, [name])
        with store.manifest.read() as txn:
            assert [row.since_ms for _, row in retired_objects(txn)] == [moment]
