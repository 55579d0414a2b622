"""Records of bulk loads, so that a commit whose answer was lost can be asked for again.

A note, `loads/<number>.json`, is written before the `Compaction` event and says `done` after it, with no other compaction in
between. So after a crash the manifest answers what the note does not: its tables are live, or the load never happened.
Snapshots and forks take no notes along. Loads no Arrow.

Threads: whoever holds the compaction lock writes; anybody reads. Raises what the disk raises, `Corruption`."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress

import msgspec

from quire.core.errors import Corruption
from quire.durable.files import Disk, read_all, write_atomic
from quire.durable.names import TEMPORARY, LsmHome, load_number

KEPT = 1_024


class LoadNote(msgspec.Struct, frozen=True, kw_only=True):
    """One load."""

    number: int
    at_ms: int
    rows: int
    ids: tuple[int, ...]
    done: bool = False


def write_note(disk: Disk, home: LsmHome, note: LoadNote) -> None:
    """Have a note on disk, in place of an earlier one of the same load."""
    disk.make_dirs(f"{home.path}/loads")
    write_atomic(disk, home.load(note.number), msgspec.json.encode(note))


def remove_note(disk: Disk, home: LsmHome, number: int) -> None:
    """The load did not happen."""
    with suppress(FileNotFoundError):
        disk.remove(home.load(number))


def read_note(disk: Disk, home: LsmHome, number: int) -> LoadNote | None:
    """What is remembered of a load; `None` if that is nothing."""
    path = home.load(number)
    try:
        data = read_all(disk, path)
    except FileNotFoundError:
        return None
    try:
        return msgspec.json.decode(data, type=LoadNote)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        hint = "remove the file if no client is waiting for this load"
        raise Corruption(
            "the record of a bulk load cannot be decoded", hint=hint, path=path, cause=str(error)
        ) from error


def settle_notes(disk: Disk, home: LsmHome, live: Collection[int]) -> None:
    """Decide what a crash left open, and forget what is old."""
    try:
        names = disk.names(f"{home.path}/loads")
    except FileNotFoundError:
        return
    done: list[LoadNote] = []
    for name in names:
        number = load_number(name)
        if number is None:
            if name.endswith(TEMPORARY):
                disk.remove(f"{home.path}/loads/{name}")
            continue
        note = read_note(disk, home, number)
        assert note is not None, "nobody else is here"
        if not note.done:
            if not set(note.ids) <= set(live):
                remove_note(disk, home, number)
                continue
            note = msgspec.structs.replace(note, done=True)
            write_note(disk, home, note)
        done.append(note)
    for note in sorted(done, key=lambda note: note.at_ms)[:-KEPT]:
        remove_note(disk, home, note.number)
