"""A damaged log object: what was archived before it can be restored, cloned, and taken over."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import quire
from quire.archive.format import HEADER_BYTES, Kind, Position, log_key
from quire.archive.log_reader import epochs, find, log_positions
from quire.archive.window import Line, abandoned_epochs, list_archive, plan_trim
from quire.cli.main import run
from quire.core.errors import Corruption
from quire.objects.api import ObjectStore
from quire.objects.open import open_store
from quire.store.heavy import audit_bucket
from quire.store.standby import Standby, promote
from tests.archive.archived_store import WAIT, ArchivedStore, contents, fill, kill
from tests.archive.test_window import WindowedStore, run_hours, value_of

Damage = Callable[[bytes], bytes]

DAMAGES: dict[str, Damage] = {
    "empty": lambda _: b"",
    "header": lambda data: b"X" + data[1:],
    "events": lambda data: data[:HEADER_BYTES] + bytes(byte ^ 0xFF for byte in data[HEADER_BYTES:]),
    "short": lambda data: data[:-1],
}


class Damaged:
    """A closed store whose last log object is damaged."""

    def __init__(self, home: Path, damage: Damage) -> None:
        self.archived = ArchivedStore(home)
        fill(self.archived.store, 0)
        self.archived.wait_archived()
        self.expected = contents(self.archived.store)
        self.last = self.archived.headers()[-1]
        fill(self.archived.store, 1_000, 1)
        self.archived.wait_archived()
        self.archived.close()
        self.bucket = str(self.archived.bucket)
        self.after = [header.position for header in self.archived.headers() if header.position > self.last.position]
        path = self.archived.log_path(self.after[0])
        path.write_bytes(damage(path.read_bytes()))
        for position in self.after[1:]:
            self.archived.log_path(position).unlink()


@pytest.fixture(params=DAMAGES)
def damaged(tmp_path: Path, request: pytest.FixtureRequest) -> Damaged:
    return Damaged(tmp_path, DAMAGES[request.param])


def test_the_state_before_a_damaged_last_object_is_restored(damaged: Damaged, tmp_path: Path) -> None:
    restored = quire.restore(damaged.bucket, tmp_path / "restored")
    assert restored.position == damaged.last.position
    assert restored.damaged == (damaged.after[0],)
    with quire.open(tmp_path / "restored", "r") as store:
        assert contents(store) == damaged.expected


def test_an_earlier_moment_is_restored(damaged: Damaged, tmp_path: Path) -> None:
    restored = quire.restore(damaged.bucket, tmp_path / "restored", at_ms=damaged.last.at_ms)
    assert restored.position == damaged.last.position
    with quire.open(tmp_path / "restored", "r") as store:
        assert contents(store) == damaged.expected


def test_the_state_before_it_is_taken_over_and_cloned(
    damaged: Damaged, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quire.clone(damaged.bucket, tmp_path / "clone")
    with quire.open(tmp_path / "clone", "r") as store:
        assert contents(store) == damaged.expected
    assert run(["restore-store", damaged.bucket, str(tmp_path / "owner"), "--takeover"]) == 0
    assert f"1 object after this state: object {damaged.after[0]} of the log is damaged" in capsys.readouterr().out
    with damaged.archived.open(tmp_path / "owner") as store:
        assert contents(store) == damaged.expected
        fill(store, 2_000, 1)
        expected = contents(store)
    store_id = damaged.archived.store_id
    quire.restore(damaged.bucket, tmp_path / "again", store_id=store_id)
    with quire.open(tmp_path / "again", "r") as store:
        assert contents(store) == expected


def test_a_standby_gives_a_damaged_object_up_only_if_it_is_told(damaged: Damaged, tmp_path: Path) -> None:
    with Standby(damaged.bucket, tmp_path / "standby") as standby, pytest.raises(Corruption):
        standby.poll()
    with pytest.raises(Corruption):
        promote(tmp_path / "standby")
    with closing(open_store(damaged.bucket)) as bucket:
        assert epochs(bucket, damaged.archived.store_id) == [1]
    promoted = promote(tmp_path / "standby", discard=True)
    assert (promoted.position, promoted.newest, promoted.dropped) == (damaged.last.position, damaged.after[0], 1)
    with damaged.archived.open(tmp_path / "standby") as store:
        assert contents(store) == damaged.expected


def test_other_names_in_the_archive_are_ignored(tmp_path: Path) -> None:
    archived = ArchivedStore(tmp_path)
    fill(archived.store, 0)
    archived.wait_archived()
    expected = contents(archived.store)
    root = archived.bucket / archived.store_id
    for name in ("archive/old-logs/x", "archive/0000000g/log/x", "clones/readme", "standby/readme", "owner/readme"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"not ours")
    archived.store.maintain()
    archived.store._parts.window.look(now=True)
    with closing(open_store(str(archived.bucket))) as bucket:
        assert epochs(bucket, archived.store_id) == [1]
        assert log_positions(bucket, archived.store_id, 1)
    archived.close()
    quire.restore(str(archived.bucket), tmp_path / "restored", takeover=True)
    with quire.open(tmp_path / "restored", "r") as store:
        assert contents(store) == expected


@pytest.fixture
def two_bases(tmp_path: Path) -> tuple[ArchivedStore, dict[str, Any]]:
    """The archive of a killed owner with two bases, and what it archived. A standby has applied none of it."""
    archived = ArchivedStore(tmp_path)
    fill(archived.store, 0)
    archived.wait_archived()
    with archived.archiver._cutting:
        archived.archiver._begin_base()  # as when it is due: `base()` begins a new chain
    base = archived.archiver._base_thread
    assert base is not None
    base.join()
    fill(archived.store, 20)
    archived.wait_archived()
    expected = contents(archived.store)
    kill(archived.store)
    return archived, expected


def parts_of_newest_base(archived: ArchivedStore) -> list[Path]:
    with closing(open_store(str(archived.bucket))) as bucket:
        return [archived.bucket / key for key, _, _ in find(bucket, archived.store_id).base.parts]


@pytest.mark.parametrize("damage_of", ["header", "events", "missing"])
def test_if_a_part_of_a_base_is_damaged_the_base_before_and_the_log_are_restored(
    two_bases: tuple[ArchivedStore, dict[str, Any]], tmp_path: Path, damage_of: str
) -> None:
    """Hazard: nothing newer than the base before could be restored, although the log has all of it."""
    archived, expected = two_bases
    (part,) = parts_of_newest_base(archived)
    if damage_of == "missing":
        part.unlink()
    else:
        part.write_bytes(DAMAGES[damage_of](part.read_bytes()))
    restored = quire.restore(str(archived.bucket), tmp_path / "restored")
    assert restored.position == archived.headers()[-1].position
    quire.clone(str(archived.bucket), tmp_path / "clone", store_id=archived.store_id)
    with Standby(str(archived.bucket), tmp_path / "standby", store_id=archived.store_id) as standby:
        standby.promote()
    for directory in ("restored", "clone", "standby"):
        with quire.open(tmp_path / directory, "r") as store:
            assert contents(store) == expected, directory
            assert store.manifest.check() == []


def test_a_base_before_a_break_of_the_chain_is_not_restored_in_place_of_a_damaged_one(
    two_bases: tuple[ArchivedStore, dict[str, Any]], tmp_path: Path
) -> None:
    """The log between them lacks changes."""
    archived, _ = two_bases
    with archived.open() as store:  # a killed owner continues with a base
        fill(store, 40)
        assert store.archive is not None
        store.archive.wait(WAIT)
    (part,) = parts_of_newest_base(archived)
    part.write_bytes(b"damaged")
    with pytest.raises(Corruption, match="does not match"):
        quire.restore(str(archived.bucket), tmp_path / "restored")


def test_another_backup_is_not_restored_in_place_of_a_damaged_one(tmp_path: Path) -> None:
    """The log between two backups has nothing of what changed between them."""
    with quire.open(tmp_path / "store") as store:
        for start in (0, 20):
            fill(store, start)
            store.backup(str(tmp_path / "backups"))
        store_id = store.info().store_id
    with closing(open_store(str(tmp_path / "backups"))) as bucket:
        parts = find(bucket, store_id).base.parts
    (tmp_path / "backups" / parts[-1][0]).write_bytes(b"damaged")
    with pytest.raises(Corruption, match="does not match"):
        quire.restore(str(tmp_path / "backups"), tmp_path / "restored")


def planned(store: ObjectStore, store_id: str, before_ms: int) -> set[str]:
    """The objects that trimming would delete."""
    listing = list_archive(store, store_id)
    kept = Line(store, listing).kept(before_ms)
    if kept is None:
        return set()
    plan = plan_trim(store, listing, kept, ())
    return {*plan.parts, *plan.logs, *plan.files}


def test_a_damaged_header_anywhere_in_the_log_stops_no_trimming_and_makes_none_bolder(tmp_path: Path) -> None:
    """Hazard: if the bisection met it, or if it was that of object 0, nothing was trimmed, and no retired object deleted."""
    archived = ArchivedStore(tmp_path)
    moments = []
    for start in range(0, 80, 20):
        fill(archived.store, start)
        archived.wait_archived()
        archived.archiver.base()
        moments.append(archived.headers()[-1])
    archived.close()
    with closing(open_store(str(archived.bucket))) as bucket:
        for moment in moments:
            whole = planned(bucket, archived.store_id, moment.at_ms)
            assert whole or moment is moments[0]
            empty_plans = []
            for header in archived.headers():
                path = archived.log_path(header.position)
                data = path.read_bytes()
                path.write_bytes(b"X" + data[1:])
                plan = planned(bucket, archived.store_id, moment.at_ms)
                path.write_bytes(data)
                assert plan <= whole, header.position
                if not plan:
                    empty_plans.append(header.position.number)
            if whole:
                assert set(empty_plans) <= {moment.base}, "only what cannot be found out is kept"


def test_trimming_passes_a_damaged_object(tmp_path: Path) -> None:
    windowed = WindowedStore(tmp_path)
    with windowed.open() as store:
        run_hours(windowed, store, 1)
        store_id = store.info().store_id
        for number in (0, 1):
            (tmp_path / "bucket" / log_key(store_id, Position(1, number))).write_bytes(b"damaged")
        run_hours(windowed, store, 5)
        store.maintain()
        assert min(list_archive(store.objects, store_id).epochs[1].logs) > 1
        assert value_of(windowed.restored()) == 4


@pytest.fixture
def taken_over(tmp_path: Path) -> ArchivedStore:
    """The archive of two owners, both of which are closed."""
    archived = ArchivedStore(tmp_path)
    fill(archived.store, 0)
    archived.close()
    path = archived.restore("successor", takeover=True)
    with archived.open(path) as store:
        fill(store, 20)
        assert store.archive is not None
        store.archive.base()
    return archived


def damage(archived: ArchivedStore, position: Position) -> None:
    archived.log_path(position).write_bytes(b"damaged")


def test_former_owners_are_not_taken_for_abandoned_if_the_first_object_is_damaged(taken_over: ArchivedStore) -> None:
    """Hazard: without the first object nobody knows which owner it continued. Objects of an abandoned owner may be removed."""
    with closing(open_store(str(taken_over.bucket))) as bucket:
        assert Line(bucket, list_archive(bucket, taken_over.store_id)).off_line() == ()
        damage(taken_over, Position(2, 0))
        line = Line(bucket, list_archive(bucket, taken_over.store_id))
        assert [epoch for epoch, _ in line.epochs] == [2]
        assert line.oldest() is not None
        with pytest.raises(Corruption):
            line.off_line()
        with pytest.raises(Corruption):
            abandoned_epochs(bucket, taken_over.store_id)
    audit = audit_bucket(str(taken_over.bucket))
    assert {row["artifact"] for row in audit.problems} == {log_key(taken_over.store_id, Position(2, 0))}
    assert audit.orphans == []


def test_a_moment_of_a_former_owner_is_restored_although_the_first_object_of_its_successor_is_damaged(
    taken_over: ArchivedStore, tmp_path: Path
) -> None:
    """Hazard: the search for the moment ended there, although the former owner's log is intact."""
    former = [header for header in taken_over.headers() if header.kind is not Kind.SEAL][-1]
    expected = taken_over.restored_contents(at_ms=former.at_ms)
    damage(taken_over, Position(2, 0))
    restored = quire.restore(str(taken_over.bucket), tmp_path / "restored", at_ms=former.at_ms)
    assert restored.position == former.position
    with quire.open(tmp_path / "restored", "r") as store:
        assert contents(store) == expected


def test_a_directory_is_taken_over_although_the_object_that_it_was_restored_to_is_damaged_since(
    two_bases: tuple[ArchivedStore, dict[str, Any]], tmp_path: Path
) -> None:
    """Hazard: the moment was said to have left the window. The directory has everything that the object contains."""
    archived, expected = two_bases
    archived.restore()
    with Standby(str(archived.bucket), tmp_path / "standby", store_id=archived.store_id) as standby:
        standby.poll()
    damage(archived, archived.headers()[-1].position)
    shutil.copytree(archived.bucket, tmp_path / "kept")
    promote(tmp_path / "standby")
    shutil.rmtree(archived.bucket)
    (tmp_path / "kept").rename(archived.bucket)
    archived.open(tmp_path / "restored", takeover=True).close()
    for directory in ("standby", "restored"):
        with quire.open(tmp_path / directory, "r") as store:
            assert contents(store) == expected


def test_a_killed_owner_archives_again_although_its_last_object_is_damaged(
    two_bases: tuple[ArchivedStore, dict[str, Any]],
) -> None:
    """Hazard: it archived nothing more until it was taken over."""
    archived, _ = two_bases
    damage(archived, archived.headers()[-1].position)
    with archived.open() as store:
        fill(store, 40)
        assert store.archive is not None
        store.archive.wait(WAIT)
        expected = contents(store)
    assert archived.restored_contents() == expected


def test_a_damaged_seal_is_kept(taken_over: ArchivedStore) -> None:
    """Hazard: its name stops an owner that was suspended for longer than the window, whatever its bytes are."""
    with closing(open_store(str(taken_over.bucket))) as bucket:
        ending = log_positions(bucket, taken_over.store_id, 1)[-1]
        damage(taken_over, ending)
        listing = list_archive(bucket, taken_over.store_id)
        kept = Line(bucket, listing).kept(1 << 62)
        assert kept is not None
        plan = plan_trim(bucket, listing, kept, [1])
        assert log_key(taken_over.store_id, ending) not in plan.logs
        assert log_key(taken_over.store_id, Position(1, 0)) in plan.logs
