"""A takeover has everything that its predecessor acknowledged, however late that was written."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

import quire
from quire.archive.format import NO_DIGEST, Header, Kind, Position, encode_object, log_key
from quire.archive.log_reader import find, header_of, log_positions, owner_log, read_object
from quire.archive.sealing import seal
from quire.archive.window import Line, list_archive
from quire.core.errors import AlreadyExists, InvalidInput, QuireError, StoreFenced
from quire.durable import names
from quire.durable.failpoints import armed
from quire.durable.files import OsDisk
from quire.objects.api import DeletableStore
from quire.objects.open import open_store
from quire.store.layout import DirectoryState, directory_state
from quire.testing.clock import ManualClock
from tests.archive.archived_store import WAIT, ArchivedStore, archived_store, contents, fill, kill, until


def owner(tmp_path: Path) -> quire.Store:
    archive = quire.ArchiveSettings(mode="sync", interval_seconds=0.05)
    settings = quire.StoreSettings(object_store=str(tmp_path / "bucket"), archive=archive)
    return quire.open(tmp_path / "owner", settings=settings)


def test_a_takeover_includes_what_was_archived_while_it_was_reading(tmp_path: Path) -> None:
    store = owner(tmp_path)
    cart = store.kv("cart", create=True)
    cart.put(b"first", b"1")
    store.archive.wait()  # type: ignore[union-attr]
    written: list[bytes] = []

    def while_reading(step: str, done: int, total: int) -> None:
        if step == "log" and done == total and not written:  # the restore has read everything it knows of
            for number in range(3):
                cart.put(b"late %d" % number, b"2")
                store.archive.wait()  # type: ignore[union-attr]
                written.append(b"late %d" % number)

    quire.restore(str(tmp_path / "bucket"), tmp_path / "successor", takeover=True, progress=while_reading)
    with quire.open(tmp_path / "successor") as successor:
        assert [successor.kv("cart").get(key) for key in [b"first", *written]] == [b"1", b"2", b"2", b"2"]
    with pytest.raises(quire.QuireError):
        put_and_wait(store, b"after")
    store.close()


@pytest.mark.parametrize("read", ["base", "log"])
def test_a_takeover_whose_log_is_trimmed_while_it_is_reading_begins_again(tmp_path: Path, read: str) -> None:
    """Hazard: a takeover ended with `ObjectNotFound` if the owner had meanwhile removed objects that it was about to read, or
    the last one that it knew of."""
    clock = ManualClock()
    with archived_store(tmp_path, clock=clock, retain_seconds=60.0, base_seconds=3_600.0) as archived:
        for start in (0, 100, 200, 300):  # more objects than are read ahead
            fill(archived.store, start)
            archived.wait_archived()
        expected: list[dict[str, Any]] = []

        def trim(step: str, done: int, total: int) -> None:
            if step == read and done == total and not expected:
                fill(archived.store, 400)
                archived.archiver.base()
                clock.advance(120)
                archived.store._parts.window.look(now=True)
                expected.append(contents(archived.store))

        archived.restore("successor", takeover=True, progress=trim)
        with archived.open(tmp_path / "successor") as successor:
            assert contents(successor) == expected[0]
        with suppress(StoreFenced):
            archived.store.close()


@pytest.mark.parametrize("is_broken", [False, True], ids=["continuous before", "broken before"])
def test_a_takeover_includes_what_an_owner_that_restarts_meanwhile_archives(tmp_path: Path, is_broken: bool) -> None:
    """Hazard: a restarted owner breaks the chain and continues with a base. Changes that it acknowledged between the
    reading of its log and the takeover's claim were left out, because they follow a break."""
    archived = ArchivedStore(tmp_path)
    fill(archived.store, 0)
    archived.wait_archived()
    kill(archived.store)
    if is_broken:
        with armed("archive.base.begun", "raise:EIO"):
            restarted = archived.open()
            fill(restarted, 50)
            until(lambda: len(archived.headers()) > len({header.restorable for header in archived.headers()}))
            kill(restarted)
    acknowledged: list[dict[str, Any]] = []

    def restart(_: str) -> None:
        if not acknowledged:
            with archived.open() as store:
                fill(store, 100)
                store.archive.wait(WAIT)  # type: ignore[union-attr]
                acknowledged.append(contents(store))

    with armed("restore.replayed", restart):
        archived.restore("successor", takeover=True)
    with archived.open(tmp_path / "successor") as successor:
        assert contents(successor) == acknowledged[0]


def test_a_takeover_includes_what_an_owner_archives_that_completes_its_first_base_meanwhile(tmp_path: Path) -> None:
    """Hazard: until then the newest state is that of the owner before it, whose log was the only one that was sealed."""
    archived = ArchivedStore(tmp_path)
    fill(archived.store, 0)
    archived.wait_archived()
    archived.close()
    with armed("archive.base.begun", "raise:EIO"):
        archived.restore("second", takeover=True)
        second = archived.open(tmp_path / "second")
        fill(second, 50)
        until(lambda: archived.epochs() == [1, 2])
        kill(second)
    acknowledged: list[dict[str, Any]] = []

    def restart(_: str) -> None:
        if not acknowledged:
            with archived.open(tmp_path / "second") as store:
                fill(store, 100)
                store.archive.wait(WAIT)  # type: ignore[union-attr]
                acknowledged.append(contents(store))

    with armed("restore.replayed", restart):
        archived.restore("third", takeover=True)
    with archived.open(tmp_path / "third") as successor:
        assert contents(successor) == acknowledged[0]


class DyingDisk(OsDisk):
    """A disk whose process dies when it removes the manifest."""

    def remove(self, path: str) -> None:
        if os.path.basename(path) == names.MANIFEST:
            raise OSError(errno.EIO, "died", path)
        super().remove(path)


@pytest.mark.parametrize("disk", [OsDisk, DyingDisk], ids=["completes", "dies"])
def test_a_takeover_that_begins_again_empties_its_directory_but_never_leaves_half_a_store(
    tmp_path: Path, disk: type[OsDisk]
) -> None:
    """Hazards: `.files/` was removed first, so a kill left rows and files that opened as a store; and `lost+found`, which
    belongs to the file system, was removed too."""
    archived = ArchivedStore(tmp_path)
    fill(archived.store, 0)
    archived.wait_archived()
    kill(archived.store)
    restarted: list[bool] = []

    def restart(_: str) -> None:
        if not restarted:
            with archived.open() as store:
                fill(store, 100)
                store.archive.wait(WAIT)  # type: ignore[union-attr]
                restarted.append(True)

    target = tmp_path / "successor"
    (target / "lost+found").mkdir(parents=True)
    (target / "lost+found" / "#12").write_bytes(b"recovered by fsck")
    with armed("restore.replayed", restart), suppress(OSError):
        archived.restore("successor", takeover=True, disk=disk())
    assert (target / "lost+found" / "#12").read_bytes() == b"recovered by fsck"
    if disk is OsDisk:
        assert directory_state(OsDisk(), str(target)) is DirectoryState.STORE
    else:
        with pytest.raises(InvalidInput, match="did not complete"):
            archived.open(target)


def put_and_wait(store: quire.Store, key: bytes) -> None:
    store.kv("cart").put(key, b"3")
    store.archive.wait()  # type: ignore[union-attr]


def test_a_seal_passes_on_everything_after_the_known_object(tmp_path: Path) -> None:
    with owner(tmp_path) as store:
        store.kv("cart", create=True).put(b"a", b"1")
        store.archive.wait()  # type: ignore[union-attr]
        store_id = store.info().store_id
    bucket = open_store(str(tmp_path / "bucket"))
    point = find(bucket, store_id)
    first = Position(point.position.epoch, 0)
    key_digest = header_of(bucket, store_id, Position(first.epoch, 1)).parent_digest
    passed: list[Position] = []
    last, _ = seal(
        bucket,
        store_id,
        first.epoch,
        first.epoch + 1,
        0,
        known=(header_of(bucket, store_id, first), key_digest),
        overtaken=lambda header, _digest, _events: passed.append(header.position),
    )
    assert passed == [Position(first.epoch, number) for number in range(1, point.position.number + 1)]
    assert last == point.position
    assert owner_log(bucket, store_id, first.epoch).seal is not None
    bucket.close()


# ── an owner that is faster than the sealer ───────────────────────────────────────────────────────────────────────────
STORE = "11111111-2222-3333-4444-555555555555"


class BusyOwner:
    """An owner that uses its numbers in order, and acknowledges what it has put."""

    def __init__(self, bucket: DeletableStore) -> None:
        self.bucket = bucket
        self.acknowledged: list[Position] = []
        self.is_fenced = False
        self._digest = NO_DIGEST

    def put(self, objects: int) -> None:
        for _ in range(objects):
            if self.is_fenced:
                return
            position = Position(1, len(self.acknowledged))
            parent = Position(1, position.number - 1) if position.number else Position(0, 0)
            header = Header(kind=Kind.LOG, position=position, parent=parent, parent_digest=self._digest, at_ms=1)
            data = encode_object(header, [])
            try:
                self.bucket.put(log_key(STORE, position), data, create_only=True)
            except AlreadyExists:
                self.is_fenced = True
                return
            self._digest = sha256(data).digest()
            self.acknowledged.append(position)


class CrowdedBucket:
    """The sealer's view of the bucket: before each of its requests the owner puts some objects."""

    def __init__(self, owner: BusyOwner, objects: int) -> None:
        self._owner, self._objects = owner, objects
        self.requests = 0

    def __getattr__(self, name: str) -> Any:
        def request(*args: Any, **kwargs: Any) -> Any:
            self.requests += 1
            self._owner.put(self._objects)
            return getattr(self._owner.bucket, name)(*args, **kwargs)

        return request


@pytest.fixture
def bucket() -> Iterator[DeletableStore]:
    with closing(open_store(f"memory://{uuid4()}")) as bucket:
        yield bucket


def sealed_by(store: Any, successor: int, known: tuple[Header, bytes] | None = None) -> tuple[Position, list[Position]]:
    """(last object, objects that were passed over)"""
    passed: list[Position] = []
    last, _ = seal(
        store, STORE, 1, successor, 0, known=known, overtaken=lambda header, *_: passed.append(header.position)
    )
    return last, passed


@pytest.mark.parametrize("objects", [1, 2, 7, 50])
def test_an_owner_that_puts_between_all_requests_is_soon_sealed(bucket: DeletableStore, objects: int) -> None:
    owner = BusyOwner(bucket)
    owner.put(1)
    known = read_object(bucket, STORE, Position(1, 0))
    crowded = CrowdedBucket(owner, objects)
    last, passed = sealed_by(crowded, 2, known[:2])
    owner.put(1)
    assert owner.is_fenced, "fenced before it acknowledges anything that the successor lacks"
    assert passed == owner.acknowledged[1:]
    assert last == owner.acknowledged[-1]
    # two requests for each object that was overtaken, and the seals ahead
    assert crowded.requests <= 2 * len(passed) + 20
    log = owner_log(bucket, STORE, 1)
    assert log.positions == owner.acknowledged
    assert log.seal is not None
    assert log.seal.position.number == len(owner.acknowledged), "the first seal follows the last object"


def test_an_idle_owner_is_sealed_with_one_object(bucket: DeletableStore) -> None:
    owner = BusyOwner(bucket)
    owner.put(3)
    assert sealed_by(bucket, 2) == (Position(1, 2), [])
    assert len(log_positions(bucket, STORE, 1)) == 4


class SealerDied(Exception):
    """The sealer's process ends."""


@pytest.mark.parametrize("dies_at", range(1, 14))
def test_a_sealer_that_dies_at_any_request_is_completed_by_the_next(bucket: DeletableStore, dies_at: int) -> None:
    owner = BusyOwner(bucket)
    owner.put(1)
    known = read_object(bucket, STORE, Position(1, 0))[:2]

    class DyingBucket(CrowdedBucket):
        def __getattr__(self, name: str) -> Any:
            if self.requests + 1 == dies_at:
                raise SealerDied
            return super().__getattr__(name)

    with suppress(SealerDied):
        sealed_by(DyingBucket(owner, 3), 2, known)
    acknowledged = len(owner.acknowledged)
    last, passed = sealed_by(CrowdedBucket(owner, 3), 3, known)
    owner.put(1)
    assert owner.is_fenced
    assert len(owner.acknowledged) >= acknowledged
    assert last == owner.acknowledged[-1]
    assert passed == owner.acknowledged[1:]
    log_line = Line(bucket, list_archive(bucket, STORE))
    assert log_line.epochs == [(1, range(len(owner.acknowledged)))]


def test_of_two_sealers_the_higher_epoch_wins_and_both_agree_where_the_log_ends(bucket: DeletableStore) -> None:
    owner = BusyOwner(bucket)
    owner.put(1)
    known = read_object(bucket, STORE, Position(1, 0))[:2]
    other_ends: list[Position] = []

    class OvertakingBucket(CrowdedBucket):
        def __getattr__(self, name: str) -> Any:
            if self.requests == 5 and not other_ends:
                other_ends.append(sealed_by(CrowdedBucket(owner, 2), 3, known)[0])
            return super().__getattr__(name)

    with pytest.raises(StoreFenced, match="owner epoch 3"):
        sealed_by(OvertakingBucket(owner, 2), 2, known)
    assert other_ends == owner.acknowledged[-1:]


def test_a_takeover_from_a_busy_owner_ends_and_has_what_was_acknowledged(tmp_path: Path) -> None:
    store = owner(tmp_path)
    cart = store.kv("cart", create=True)
    acknowledged: list[bytes] = []
    begun = threading.Event()

    def write(name: int) -> None:
        for number in range(1_000_000):
            key = b"%d-%d" % (name, number)
            try:
                cart.put(key, b"1")
            except QuireError:
                return
            acknowledged.append(key)
            begun.set()

    writers = [threading.Thread(target=write, args=(name,)) for name in range(4)]
    for writer in writers:
        writer.start()
    assert begun.wait(60)
    quire.restore(str(tmp_path / "bucket"), tmp_path / "successor", takeover=True)
    for writer in writers:
        writer.join(60)
        assert not writer.is_alive(), "the deposed owner still acknowledges"
    with quire.open(tmp_path / "successor") as successor:
        restored_keys = {key for key, _ in successor.kv("cart").scan()}
    assert set(acknowledged) <= restored_keys
    with suppress(QuireError):
        store.close()


@pytest.mark.parametrize("is_sealed_there", [False, True])
def test_a_seal_in_a_trimmed_part_of_the_log_is_followed_by_one_at_its_end(
    bucket: DeletableStore, is_sealed_there: bool
) -> None:
    """The number after the known object was free, because the owner had removed it: that seal stopped nobody."""
    owner = BusyOwner(bucket)
    owner.put(6)
    known = read_object(bucket, STORE, Position(1, 1))
    for position in owner.acknowledged[:4]:
        bucket.delete(log_key(STORE, position))
    if is_sealed_there:  # by a takeover that died before it noticed
        with armed("archive.seal.put", "1*raise:EIO"), pytest.raises(OSError, match="failpoint"):
            sealed_by(bucket, 2, known[:2])
    last, passed = sealed_by(bucket, 2, known[:2])
    assert passed == []
    assert last == owner.acknowledged[-1]
    owner.put(1)
    assert owner.is_fenced
