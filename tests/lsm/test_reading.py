"""Concurrent readers and writers: what a scan and a snapshot see, what they wait for, and what is released after them."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import pytest

from quire.core.errors import InvalidInput
from quire.durable.failpoints import armed
from tests.lsm.kv_helpers import TINY, assert_sound, open_kv
from tests.manifest.helpers import eventually


def test_scans_and_snapshots_do_not_wait_behind_a_stalled_writer(tmp_path: Path) -> None:
    """The writer waits for a flush that does not end; readers used to wait for the writer."""
    entered, go_on = threading.Event(), threading.Event()

    def stall(_: str) -> None:
        entered.set()
        go_on.wait()

    settings = msgspec.structs.replace(TINY, stall_seconds=600, frozen_max=1)
    with armed("lsm.flush.begun", stall), open_kv(tmp_path, settings=settings, background=True) as kv:

        def write() -> None:
            for n in range(100):
                kv.put(b"%03d" % n, bytes(300), sync=False)

        writer = threading.Thread(target=write)
        writer.start()
        try:
            entered.wait()
            assert eventually(lambda: kv.stats().stalled_writers == 1)
            written = kv.last_lsn
            answers = list[int]()

            def read() -> None:
                with kv.snapshot() as snapshot:
                    answers.extend([len(list(snapshot.scan())), len(list(kv.scan()))])

            reader = threading.Thread(target=read, daemon=True)
            reader.start()
            reader.join(60)
            assert answers == [written, written]
            assert kv.stats().stalled_writers == 1
        finally:
            go_on.set()
            writer.join()
        assert kv.stats().stalls >= 1
        assert len(list(kv.scan())) == 100
        assert_sound(kv)


def test_snapshots_do_not_wait_behind_a_write_that_hangs_on_the_disk(tmp_path: Path) -> None:
    entered, go_on = threading.Event(), threading.Event()

    def stall(_: str) -> None:
        entered.set()
        go_on.wait()

    with open_kv(tmp_path) as kv:
        kv.put(b"a", b"1")
        with armed("lsm.freeze.created", stall):  # while holding the write lock
            flusher = threading.Thread(target=kv.flush)
            flusher.start()
            try:
                entered.wait()
                values = list[bytes | None]()

                def read() -> None:
                    with kv.snapshot() as snapshot:
                        values.append(snapshot.get(b"a"))

                reader = threading.Thread(target=read, daemon=True)
                reader.start()
                reader.join(60)
                assert values == [b"1"]
            finally:
                go_on.set()
                flusher.join()


def test_a_scan_sees_the_state_at_its_call(tmp_path: Path) -> None:
    with open_kv(tmp_path) as kv:
        kv.put(b"a", b"1")
        pairs, batches = kv.scan(), kv.scan_batches()
        kv.write({b"a": b"2", b"b": b"3"})
        kv.compact()
        assert list(pairs) == [(b"a", b"1")]
        assert [batch.num_rows for batch in batches] == [1]
        assert list(kv.scan()) == [(b"a", b"2"), (b"b", b"3")]
        kv.scan()  # a scan that is never started must not hold a view
        gc.collect()
        assert kv.snapshots.lsns() == ()


def test_compaction_reclaims_what_closed_snapshots_held(tmp_path: Path) -> None:
    with open_kv(tmp_path) as kv:
        kv.put(b"a", b"old" * 100)
        with kv.snapshot():
            kv.put(b"a", b"new")
            kv.compact()
            assert kv.stats().rows == 2
    with open_kv(tmp_path) as kv:  # statistics of tables are read from their files
        kv.compact()
        assert kv.stats().rows == 1
        assert kv.get(b"a") == b"new"
        compactions = kv.stats().compactions
        kv.compact()
        assert kv.stats().compactions == compactions, "nothing was left to reclaim"
        assert_sound(kv)


def test_none_is_not_a_value(tmp_path: Path) -> None:
    with open_kv(tmp_path) as kv:
        kv.put(b"a", b"1")
        with pytest.raises(InvalidInput, match="`delete`"):
            kv.put(b"a", None)  # type: ignore[arg-type]
        assert kv.get(b"a") == b"1"


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_bytes_like_key_works_everywhere(tmp_path: Path, kind: Callable[[bytes], bytes]) -> None:
    with open_kv(tmp_path) as kv:
        mutable = bytearray(b"1")
        kv.put(kind(b"a"), mutable)
        mutable[:] = b"x"
        kv.write({b"b": kind(b"2")})
        for _ in range(2):
            assert kv.get(kind(b"a")) == b"1"
            with kv.snapshot() as snapshot, kv.iterator() as cursor:
                assert snapshot.get(kind(b"b")) == b"2"
                assert next(cursor.seek(kind(b"b"))) == (b"b", b"2")
                assert next(cursor.seek_for_prev(kind(b"a"))) == (b"a", b"1")
            assert list(kv.scan(prefix=kind(b"a"))) == [(b"a", b"1")]
            assert list(kv.scan(low=kind(b"b"), high=kind(b"c"))) == [(b"b", b"2")]
            kv.flush()
        kv.delete(kind(b"a"))
        assert kv.get(b"a") is None
        for key in ("a", 3, None):
            with pytest.raises(InvalidInput):
                kv.get(key)  # type: ignore[arg-type]


def test_the_manifests_version_rises_with_every_change(tmp_path: Path) -> None:
    with open_kv(tmp_path) as kv:
        versions = [kv.stats().manifest_version]
        steps: list[Callable[[], None]] = [
            partial(kv.put, b"a", b"1"),
            kv.flush,
            partial(kv.put, b"b", b"2"),
            kv.flush,
            kv.compact,
        ]
        for step in steps:
            step()
            versions.append(kv.stats().manifest_version)
        assert versions[0] == versions[1] < versions[2] == versions[3] < versions[4] < versions[5], (
            "writes do not change the manifest"
        )
    with open_kv(tmp_path) as kv:
        assert kv.stats().manifest_version >= versions[-1]
