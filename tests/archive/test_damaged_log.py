"""A damaged log object: what was archived before it can be restored, cloned, and taken over."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

import quire
from quire.archive.format import HEADER_BYTES
from quire.archive.log_reader import epochs, log_positions
from quire.cli.main import run
from quire.core.errors import Corruption
from quire.objects.open import open_store
from quire.store.standby import Standby, promote
from tests.archive.archived_store import ArchivedStore, contents, fill

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
