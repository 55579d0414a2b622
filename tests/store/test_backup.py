"""A backup restores the store as of one moment, needs nothing but itself, and is never left half-written when it is
killed."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import BinaryIO

import msgspec
import pytest

import quire
from quire.archive.backup_recorder import KEPT, BackupRecorder
from quire.core.errors import AlreadyExists, Conflict, Corruption, CursorLost, InvalidInput, ReadOnly
from quire.core.settings import ArchiveSettings, MaintenanceSettings, StoreSettings
from quire.durable.failpoints import armed
from quire.durable.files import OsDisk
from quire.objects import tar
from quire.objects.api import list_objects
from quire.objects.guarded import GuardedStore
from quire.objects.open import open_store
from quire.objects.tar import TarStore
from quire.service.replicas.revisions import HistoryId
from quire.store import backup, backup_index
from quire.store.store import Store
from tests.programs import run_program
from tests.rules.tree import SRC

NO_MAINTENANCE = MaintenanceSettings(enabled=False, delete_grace_seconds=0.0)


def filled(path: Path, *, settings: StoreSettings | None = None) -> Store:
    store = quire.open(path, settings=settings or StoreSettings(maintenance=NO_MAINTENANCE))
    with store.sqlite("shop", create=True) as db:
        db.execute("create table item(n integer primary key, text)")
        db.executemany("insert into item values (?, ?)", [(n, "x" * 200) for n in range(300)])
    store.checkpoint("shop")
    store.create("cart", "lsm")
    store.kv("cart").put(b"alice", b"3 apples")
    store.snapshot("cart", "monday")
    store.create("events", "stream")
    store.stream("events").append(b"first")
    store.stream("events").sync()
    return store


def contents(path: Path | str) -> tuple[list[int], list[tuple[bytes, bytes]], list[bytes]]:
    """Everything in the restored store, after a check of the manifest and a verification of all data."""
    with quire.open(path, settings=StoreSettings(maintenance=NO_MAINTENANCE)) as store:
        assert store.manifest.check() == []
        result = store.heavy.verify(runner="threads").result
        assert (result["missing"], result["altered"], result["unreadable"]) == (0, 0, 0)
        with store.sqlite("shop") as db:
            numbers = [n for (n,) in db.execute("select n from item order by n")]
        records = [record.payload for record in store.stream("events").read()]
        return numbers, list(store.kv("cart").scan()), records


def test_a_store_in_use_is_restored_as_of_one_moment(tmp_path: Path) -> None:
    with filled(tmp_path / "store") as store:
        acknowledged, stop = 300, threading.Event()

        def work() -> None:
            nonlocal acknowledged
            kv, db = store.kv("cart"), store.sqlite("shop")
            while not stop.is_set():
                kv.put(f"{acknowledged:06d}".encode(), b"x" * 100)
                db.execute("insert into item values (?, 'y')", (acknowledged,))
                acknowledged += 1
                if acknowledged % 50 == 0:  # files are created, renamed and removed while they are copied
                    kv.flush()
                    store.checkpoint("shop")
                elif acknowledged % 120 == 0:
                    store.heavy.compact("cart", runner="threads")
            db.close()

        thread = threading.Thread(target=work)
        thread.start()
        try:
            bounds = []
            for number in range(4):
                before = acknowledged
                done = store.backup(str(tmp_path / ("b" if number < 2 else f"b{number}.tar")))
                bounds.append((done, before, acknowledged + 1))
        finally:
            stop.set()
            thread.join()
    shutil.rmtree(tmp_path / "store")
    for number, (done, lower, upper) in enumerate(bounds):
        quire.restore(done.target, tmp_path / f"r{number}", at_ms=done.at_ms)
        numbers, pairs, records = contents(tmp_path / f"r{number}")
        assert numbers == list(range(len(numbers))), "a prefix of the commits"
        assert lower <= len(numbers) <= upper
        keys = [int(key) for key, _ in pairs if key != b"alice"]
        assert keys == list(range(300, 300 + len(keys)))
        assert 0 <= len(keys) - (len(numbers) - 300) <= 1, "the key is put before the row is inserted"
        assert records == [b"first"]


def test_a_backup_has_the_objects_of_a_bucket_and_of_namespaces(tmp_path: Path) -> None:
    settings = StoreSettings(object_store=str(tmp_path / "bucket"), maintenance=NO_MAINTENANCE)
    with filled(tmp_path / "store", settings=settings) as store:
        store.namespaces.create("cold", str(tmp_path / "cold"))
        store.create("archived", "pages", namespace="cold")
        with store.sqlite("archived") as db:
            db.execute("create table t(a)")
            db.execute("insert into t values (7)")
        store.checkpoint("archived")
        store.evict("archived")
        store.evict("shop")
        done = store.backup(str(tmp_path / "backup"))
        assert done.copied >= 2
    for name in ("store", "bucket", "cold"):
        shutil.rmtree(tmp_path / name)
    quire.restore(done.target, tmp_path / "restored")
    shutil.rmtree(done.target)
    assert contents(tmp_path / "restored")[0] == list(range(300))
    with quire.open(tmp_path / "restored") as store, store.sqlite("archived") as db:
        assert db.execute("select a from t").fetchall() == [(7,)]
        db.execute("insert into t values (8)")
        store.checkpoint("archived")
    assert not (tmp_path / "cold").exists(), "the restored store has its objects in its own directory"
    assert not (tmp_path / "bucket").exists()


def test_an_archived_store_is_backed_up_and_restored_without_its_archive(tmp_path: Path) -> None:
    settings = StoreSettings(
        object_store=str(tmp_path / "bucket"), maintenance=NO_MAINTENANCE, archive=ArchiveSettings(mode="async")
    )
    with filled(tmp_path / "store", settings=settings) as store:
        (tmp_path / "store" / "quire.toml").write_text(
            f'object_store = "{tmp_path / "bucket"}"\n[archive]\nmode = "async"\n'
        )
        done = store.backup(str(tmp_path / "backup.tar"))
        assert store.archive is not None
        store.archive.wait(30)
    quire.restore(done.target, tmp_path / "restored")
    expected = (list(range(300)), [(b"alice", b"3 apples")], [b"first"])
    assert contents(tmp_path / "restored") == expected
    quire.restore(str(tmp_path / "bucket"), tmp_path / "from-bucket")
    with quire.open(tmp_path / "from-bucket", "r") as store, store.sqlite("shop") as db:
        assert db.execute("select count(*) from item").fetchall() == [(300,)], "the archive is complete, too"


def test_only_new_files_are_copied(tmp_path: Path) -> None:
    with filled(tmp_path / "store") as store:
        store.kv("cart").flush()
        first = store.backup(str(tmp_path / "one"))
        assert (first.copied, first.present) == (2, 0), "one chunk and one table"
        repeated = store.backup(str(tmp_path / "one"))
        assert (repeated.copied, repeated.present) == (0, 2)
        with store.sqlite("shop") as db:
            db.execute("insert into item values (300, 'z')")
        store.checkpoint("shop")
        later = store.backup(str(tmp_path / "two.tar"), since=str(tmp_path / "one"))
        assert later.present == 2
        assert later.copied >= 1
        last = store.backup(str(tmp_path / "three"), since=str(tmp_path / "two.tar"))
        assert last.copied == 0
    quire.restore(str(tmp_path / "three"), tmp_path / "restored")
    assert contents(tmp_path / "restored")[0] == list(range(301))
    quire.restore(str(tmp_path / "one"), tmp_path / "first", at_ms=first.at_ms)
    assert contents(tmp_path / "first")[0] == list(range(300))
    shutil.rmtree(tmp_path / "one")
    with pytest.raises(quire.ObjectNotFound, match="based on an earlier one"):
        quire.restore(str(tmp_path / "three"), tmp_path / "without")


def test_files_that_are_deleted_during_a_backup_are_copied_first(tmp_path: Path) -> None:
    with filled(tmp_path / "store") as store:

        def drop(_: str) -> None:
            store.drop("shop")
            for _round in range(3):
                store.maintain()
            assert not [info for page in store.objects.list_pages() for info in page if "base:" in info.key]

        with armed("backup.cut", drop):
            store.backup(str(tmp_path / "backup"))
    quire.restore(str(tmp_path / "backup"), tmp_path / "restored")
    assert contents(tmp_path / "restored")[0] == list(range(300))


def test_a_deletion_waits_for_the_copy_of_its_object_that_has_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hazard: the deletion found the object listed, and went ahead; the backup succeeded without it, and was not restorable."""
    with filled(tmp_path / "store") as store:
        deleted, get = threading.Event(), GuardedStore.get

        def delete() -> None:
            store.drop("shop")
            for _round in range(3):
                store.maintain()
            deleted.set()

        def get_late(objects: GuardedStore, key: str) -> bytes:
            if "base:" in key and not deleting.is_alive() and not deleted.is_set():
                deleting.start()
                deleted.wait(2)  # not set while the deletion waits for this copy
            return get(objects, key)

        deleting = threading.Thread(target=delete)
        monkeypatch.setattr(GuardedStore, "get", get_late)
        store.backup(str(tmp_path / "backup"))
        deleting.join()
    quire.restore(str(tmp_path / "backup"), tmp_path / "restored")
    assert contents(tmp_path / "restored")[0] == list(range(300))


def test_an_object_that_disappears_before_it_is_copied_is_not_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hazard: a clone's parent deleted an object that nothing needed; the backup named it, and was not restorable."""
    with filled(tmp_path / "store") as store:
        stray, listing = f"{store.manifest.feed.store_id()}/e/00000001/stray", backup._objects_of
        store.objects.put(stray, b"nothing needs this")

        def listed(store: Store) -> Iterator[tuple[str, str, int]]:
            found = list(listing(store))
            assert any(key == stray for _, key, _ in found)
            (tmp_path / "store" / "objects" / stray).unlink()
            return iter(found)

        monkeypatch.setattr(backup, "_objects_of", listed)
        store.backup(str(tmp_path / "backup"))
    quire.restore(str(tmp_path / "backup"), tmp_path / "restored")
    assert contents(tmp_path / "restored")[0] == list(range(300))


def test_no_other_backup_begins_before_one_is_complete(tmp_path: Path) -> None:
    """Hazard: the second one ended the protection of the objects that the first had yet to copy; in the same target it also
    overwrote the first one's base, which reported success all the same."""
    with filled(tmp_path / "store") as store:

        def repeat_and_drop(_: str) -> None:
            for target in ("backup", "other"):
                with pytest.raises(Conflict, match="a backup of this store is already running"):
                    store.backup(str(tmp_path / target))
            store.drop("shop")
            for _round in range(3):
                store.maintain()

        with armed("backup.cut", repeat_and_drop):
            store.backup(str(tmp_path / "backup"))
    quire.restore(str(tmp_path / "backup"), tmp_path / "restored")
    assert contents(tmp_path / "restored")[0] == list(range(300))


def test_a_backup_finds_all_that_it_is_based_on_whatever_is_backed_up_there_later(tmp_path: Path) -> None:
    """Hazard: it relied on the newest backup in the place before it; when that was based on no other place, or on this one, the
    restore lacked objects, or never ended."""
    base, second, third = (str(tmp_path / name) for name in ("base", "second", "third"))
    with filled(tmp_path / "store") as store:
        store.backup(base)
        store.backup(second, since=base)
        whole = store.backup(third, since=second)
        store.drop("shop")
        for _round in range(3):
            store.maintain()
        store.backup(second)
        crossed = store.backup(base, since=third)
        last = store.backup(third, since=base)
        assert (crossed.copied, last.copied) == (0, 0)
    quire.restore(third, tmp_path / "first", at_ms=whole.at_ms)
    assert contents(tmp_path / "first")[0] == list(range(300))
    quire.restore(third, tmp_path / "last")
    with quire.open(tmp_path / "last", settings=StoreSettings(maintenance=NO_MAINTENANCE)) as store:
        assert [info.name for info in store.databases()] == ["cart", "events"]


def test_an_index_without_the_places_beyond_the_earlier_backup_is_read(tmp_path: Path) -> None:
    places = [str(tmp_path / name) for name in ("one", "two", "three")]
    with filled(tmp_path / "store") as store:
        store_id = store.manifest.feed.store_id()
        for number, place in enumerate(places):
            done = store.backup(place, since=places[number - 1] if number else "")
            index = backup_index.read_index(open_store(place), store_id, done.position)
            assert index is not None
            older = msgspec.structs.replace(index, beyond=None)
            backup_index.put_index(open_store(place), store_id, done.position, older)
    quire.restore(places[2], tmp_path / "restored")
    assert contents(tmp_path / "restored")[0] == list(range(300))


def test_a_backup_that_fails_keeps_no_files(tmp_path: Path) -> None:
    """Hazard: links to tables that it had yet to copy kept their blocks, until the store was opened again."""
    with filled(tmp_path / "store") as store:

        def flush_and_fail(_: str) -> None:
            store.kv("cart").put(b"bob", b"1 pear")
            store.kv("cart").flush()
            assert list((tmp_path / "store" / KEPT).iterdir())
            raise OSError(errno.ENOSPC, "the target is full")

        for _ in range(2):  # the recorder can be used again
            with armed("backup.base.put", flush_and_fail), pytest.raises(OSError, match="full"):
                store.backup(str(tmp_path / "backup"))
            assert not list((tmp_path / "store" / KEPT).iterdir())


def test_a_tar_file_unpacks_to_the_same_backup(tmp_path: Path) -> None:
    with filled(tmp_path / "store") as store:
        store.backup(str(tmp_path / "b.tar"))
    (tmp_path / "unpacked").mkdir()
    subprocess.run(["tar", "xf", tmp_path / "b.tar", "-C", tmp_path / "unpacked"], check=True)
    quire.restore(str(tmp_path / "unpacked"), tmp_path / "restored")
    assert contents(tmp_path / "restored")[0] == list(range(300))


def test_a_damaged_backup_is_not_restored(tmp_path: Path) -> None:
    with filled(tmp_path / "store") as store:
        store.kv("cart").flush()
        store.backup(str(tmp_path / "b"))
    backup_store = open_store(str(tmp_path / "b"))
    keys = [info.key for page in backup_store.list_pages() for info in page]
    (table,) = [key for key in keys if "/file/" in key]
    (chunk,) = [key for key in keys if "base:" in key]
    body = (tmp_path / "b" / table).read_bytes()
    (tmp_path / "b" / table).write_bytes(body[:-1] + bytes([body[-1] ^ 1]))
    with pytest.raises(Corruption, match="a file of the backup is damaged"):
        quire.restore(str(tmp_path / "b"), tmp_path / "r1")
    (tmp_path / "b" / table).write_bytes(body)
    os.unlink(tmp_path / "b" / chunk)
    with pytest.raises(Corruption, match="lacks an object"):
        quire.restore(str(tmp_path / "b"), tmp_path / "r2")


def test_the_changes_of_a_restored_backup_have_numbers_that_the_lost_ones_did_not_have(tmp_path: Path) -> None:
    """Consumers and replicas keep sequences and record ids outside the store. They skipped the changes after a restore, or took
    them for those that were lost."""
    with filled(tmp_path / "store") as store:
        done = store.backup(str(tmp_path / "b"))
        lost = store.stream("events").append(b"lost").record
        store.stream("events").sync()
        store.create("lost", "pages")
        with store.manifest.read() as txn:
            _, head = txn.feed_bounds()
            history = HistoryId.of(txn, 1)
    numbers: list[tuple[int, int]] = []
    source = done.target
    for number in range(3):  # a backup, then backups of restored ones
        first, second = (tmp_path / f"{number}{letter}" for letter in "ab")
        for directory in (first, second):
            quire.restore(source, directory)
            with quire.open(directory, settings=StoreSettings(maintenance=NO_MAINTENANCE)) as store:
                with store.manifest.read() as txn:
                    numbers.append((txn.feed_bounds()[1], store.stream("events").append(b"other").record))
                    assert HistoryId.of(txn, 1) != history
                consumer = store.manifest.feed.register(name=f"consumer-{first.name}-{directory.name}")
                with pytest.raises(CursorLost):
                    store.manifest.feed.fetch(consumer.cursor_id, after=head)
                if directory == second:
                    source = store.backup(str(tmp_path / f"b{number}")).target
    assert len({feed for feed, _ in numbers}) == len(numbers), "two restores of one backup share no numbers"
    assert min(record for _, record in numbers) > lost
    assert len({record for _, record in numbers}) == len(numbers)


def overwrite(store: Store, text: str) -> None:
    """Write the same rows again, into a chunk whose size does not depend on the text."""
    store.set_options("shop", compression="none")
    with closing(store.sqlite("shop")) as db:
        db.execute("update item set text = ?", (text * 200,))
    store.checkpoint("shop", runner="threads")


def damaged(path: Path) -> tuple[int, int, int]:
    with quire.open(path, settings=StoreSettings(maintenance=NO_MAINTENANCE)) as store:
        result = store.heavy.verify(runner="threads").result
        return result["missing"], result["altered"], result["unreadable"]


def test_a_restored_store_is_not_backed_up_beside_backups_of_what_it_lost(tmp_path: Path) -> None:
    """Hazard: it gives the names of lost objects to others. The backup took those of the lost ones for its own, as their sizes
    were equal, and verification found the restored chunk altered; otherwise it replaced them, and damaged the other backup."""
    settings = StoreSettings(maintenance=NO_MAINTENANCE)
    with filled(tmp_path / "store") as store:
        first = store.backup(str(tmp_path / "b"))
        overwrite(store, "y")
        lost = store.backup(str(tmp_path / "b"))
        store.backup(str(tmp_path / "lost.tar"), since=str(tmp_path / "b"))
    quire.restore(first.target, tmp_path / "restored", at_ms=first.at_ms)
    with quire.open(tmp_path / "restored", settings=settings) as store:
        overwrite(store, "z")
        for name, since in (("b", ""), ("new.tar", str(tmp_path / "lost.tar"))):
            with pytest.raises(Conflict, match="newer than the one from which this store was restored"):
                store.backup(str(tmp_path / name), since=since)
        for _ in range(2):
            elsewhere = store.backup(str(tmp_path / "elsewhere"))
    assert elsewhere.copied == 0, "what this store has backed up itself is not copied again"
    for target, at_ms in ((first.target, lost.at_ms), (elsewhere.target, None)):
        directory = tmp_path / f"again-{Path(target).name}"
        quire.restore(target, directory, at_ms=at_ms)
        assert damaged(directory) == (0, 0, 0)


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_restored_store_does_not_adopt_what_an_interrupted_backup_of_lost_changes_has_left(
    tmp_path: Path, is_lost: bool
) -> None:
    def interrupted_backup(store: Store, text: str) -> None:
        overwrite(store, text)
        with armed("backup.objects.copied", "1*raise:EIO"), pytest.raises(OSError, match="failpoint"):
            store.backup(str(tmp_path / "b"))

    with filled(tmp_path / "store") as store:
        target = store.backup(str(tmp_path / "b")).target
        if is_lost:
            interrupted_backup(store, "y")
    quire.restore(target, tmp_path / "restored")
    with quire.open(tmp_path / "restored", settings=StoreSettings(maintenance=NO_MAINTENANCE)) as store:
        if is_lost:
            overwrite(store, "z")
            with pytest.raises(AlreadyExists, match="not the one being written"):
                store.backup(target)
        else:
            interrupted_backup(store, "z")
            store.backup(target)
    quire.restore(target, tmp_path / "again")
    assert damaged(tmp_path / "again") == (0, 0, 0)


def test_two_backups_do_not_write_one_tar_file(tmp_path: Path) -> None:
    """Two stores, or two processes, that were given the same file wrote into one another's, and the first to end removed it."""
    path = str(tmp_path / "b.tar")
    first = TarStore(path, write=True)
    first.put("one", b"1")
    with pytest.raises(Conflict, match="another backup is writing this file"):
        TarStore(path, write=True)
    first.put("two", b"2")
    first.finish()
    first.close()
    with closing(TarStore(path)) as written:
        assert (written.get("one"), written.get("two")) == (b"1", b"2")


def test_a_backup_does_not_replace_one_that_ended_while_it_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had looked for the file before it took the lock of the unfinished one, and gave its own the name in the end."""
    path, new_file = str(tmp_path / "b.tar"), tar._new_file

    def end_first(temporary: str) -> BinaryIO:
        monkeypatch.setattr(tar, "_new_file", new_file)
        with closing(TarStore(path, write=True)) as first:
            first.put("one", b"1")
            first.finish()
        return new_file(temporary)

    monkeypatch.setattr(tar, "_new_file", end_first)
    with pytest.raises(InvalidInput, match="already exists"):
        TarStore(path, write=True)
    assert [file.name for file in tmp_path.iterdir()] == ["b.tar"]
    with closing(TarStore(path)) as written:
        assert written.get("one") == b"1"


def test_a_backup_replaces_what_a_killed_one_left(tmp_path: Path) -> None:
    (tmp_path / "b.tar.tmp").write_bytes(b"left behind" * 5_000)
    with closing(TarStore(str(tmp_path / "b.tar"), write=True)) as new:
        new.put("one", b"1")
        new.finish()
    with closing(TarStore(str(tmp_path / "b.tar"))) as written:
        assert [info.key for info in list_objects(written)] == ["one"]
        assert (tmp_path / "b.tar").stat().st_size < 20_000


def test_targets_inside_the_store_or_its_bucket_are_refused(tmp_path: Path) -> None:
    settings = StoreSettings(object_store=str(tmp_path / "bucket"), maintenance=NO_MAINTENANCE)
    with filled(tmp_path / "store", settings=settings) as store:
        for target, message in (
            (tmp_path / "store" / "b", "inside the store's directory"),
            (tmp_path / "bucket", "own object store"),
        ):
            with pytest.raises(InvalidInput, match=message):
                store.backup(str(target))
        (tmp_path / "b.tar").write_bytes(b"mine")
        with pytest.raises(InvalidInput, match="the file already exists"):
            store.backup(str(tmp_path / "b.tar"))
        with pytest.raises(InvalidInput, match="no backup of this store"):
            store.backup(str(tmp_path / "b"), since=str(tmp_path / "nothing"))
        done = store.backup(str(tmp_path / "b"))

        def repeat_step(_: str) -> None:
            with pytest.raises(Conflict, match="a backup of this store is already running"):
                store.backup(str(tmp_path / "c"))

        with armed("backup.base.put", repeat_step):
            store.backup(str(tmp_path / "b"))
    with quire.open(tmp_path / "store", "r") as reader, pytest.raises(ReadOnly):
        reader.backup(str(tmp_path / "c"))
    with pytest.raises(InvalidInput, match="a separate store"):
        quire.restore(done.target, tmp_path / "restored", takeover=True)


def test_recording_starts_between_two_commits(tmp_path: Path) -> None:
    recorder = BackupRecorder(OsDisk(), str(tmp_path), OsDisk())
    reservation = recorder.reserve()
    started, result = threading.Event(), threading.Event()

    def record() -> None:
        with recorder.recording() as queue:
            started.set()
            result.wait(10)
            taken.extend(queue.take(1 << 20)[0])

    taken: list[object] = []
    thread = threading.Thread(target=record)
    thread.start()
    assert not started.wait(0.1), "the current commit would be in neither the base nor the log"
    recorder.fill(reservation, [])
    assert started.wait(10)
    recorder.fill(recorder.reserve(), [("db", [(b"k", b"v")], [])])
    recorder.reserve().cancel()
    result.set()
    thread.join()
    assert len(taken) == 1


CHILD = """
import sys, quire
from quire.core.settings import MaintenanceSettings, StoreSettings
settings = StoreSettings(maintenance=MaintenanceSettings(enabled=False))
with quire.open(sys.argv[1], settings=settings) as store:
    with store.sqlite("shop") as db:
        db.execute("insert into item values (300, 'new')")
    store.kv("cart").flush()
    store.checkpoint("shop")
    store.backup(sys.argv[2], since=sys.argv[3])
"""


@pytest.mark.parametrize("form", ["directory", "tar"])
@pytest.mark.parametrize(
    "point",
    [
        "backup.part.put",
        "backup.base.put",
        "backup.cut",
        "backup.object.put",
        "backup.objects.copied",
        "backup.index.put",
        "backup.log.put",
        "backup.tar.synced",
    ],
)
def test_a_killed_backup_leaves_the_previous_one(tmp_path: Path, point: str, form: str) -> None:
    if (point, form) == ("backup.tar.synced", "directory"):
        point = "backup.log.put"
    target = tmp_path / ("b" if form == "directory" else "new.tar")
    with filled(tmp_path / "store") as store:
        store.backup(str(tmp_path / "b"))
    since = "" if form == "directory" else str(tmp_path / "b")
    child = run_program(
        ["-c", CHILD, str(tmp_path / "store"), str(target), since],
        env={**os.environ, "PYTHONPATH": str(SRC), "QUIRE_FAILPOINTS": f"{point}=kill"},
        check=False,
    )
    assert child.returncode == -signal.SIGKILL
    is_done = (point, form) == ("backup.log.put", "directory")
    quire.restore(str(tmp_path / "b"), tmp_path / "restored")
    assert contents(tmp_path / "restored")[0] == list(range(301 if is_done else 300))
    assert not (tmp_path / "new.tar").exists()
    with quire.open(tmp_path / "store", settings=StoreSettings(maintenance=NO_MAINTENANCE)) as store:
        store.backup(str(target), since=since)
        assert store.manifest.check() == []
    assert not list((tmp_path / "store" / "scratch").glob("*/*")), "hard links are swept"
    quire.restore(str(target), tmp_path / "again")
    assert contents(tmp_path / "again")[0] == list(range(301))
