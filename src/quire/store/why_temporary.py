"""Why files are there that come and go by themselves: what is being written, leases, spares, what loads and snapshots leave.

Nothing counts them, and no row names them: each goes with what it is for, or is swept by whoever opens that the next time.

Terms
  left over   what a process that was killed could not remove

Reads the manifest, one transaction. Raises `UnknownArtifact` for what is not there, or belongs to nothing.
"""

from __future__ import annotations

import re

from quire.core.ids import U64_MAX
from quire.durable import names
from quire.manifest import tables as t
from quire.manifest.reads import ReadTxn
from quire.store.why_database_files import Look, owned, size_of
from quire.store.why_text import OWNER_OPENS, snapshot_holder
from quire.store.why_values import Answer, Holder

_OF_STREAM = re.compile(rf"{names.STREAMS}/(?P<id>0|[1-9][0-9]{{0,19}})/.+")
_OF_PAGES = re.compile(rf"{names.PAGES}/(?P<id>[0-9a-f]{{8}})/.+")
_OF_LSM = re.compile(rf"{names.LSM}/(?P<id>[0-9a-f]{{8}})/(?P<rest>.+)")
_SPARE = re.compile(r"/hot/spare-[0-9]+\.seg\.tmp$")
_SNAPSHOT = re.compile(r"snapshots/(?P<number>[0-9]{6,20})/.+")
_SCRATCH = re.compile(rf"{names.SCRATCH}/[0-9]+(/.+)?")
_PROBE = re.compile(rf"({names.OBJECTS}/)?doctor/[0-9a-f]{{16}}")
_STAGED = f"{names.OBJECTS}/{names.TEMPORARY}/"
_UNFINISHED = f"{names.MANIFEST}{names.TEMPORARY}-lock"
"""LMDB's lock beside a manifest that has not got its name yet."""

WRITES = "writes it, or did when it ended"


def of_passing(txn: ReadTxn, path: str, look: Look | None) -> Answer | None:
    """What keeps a file that comes and goes by itself; `None` if it is none of these."""
    stem = names.parse_path(path.removesuffix(names.TEMPORARY))
    if isinstance(stem, names.LeaseFile):
        what, release = "says with it which version it reads", "when it closes or ends; the owner removes what is left"
        return _answer(path, look, Holder("reader", str(stem.reader), what, release))
    if _SCRATCH.fullmatch(path):
        what = "has rows of a load in it, or pages of a large transaction"
        return _answer(
            path, look, Holder("store", "the owner", what, f"when that is done; what is left, {OWNER_OPENS}")
        )
    if path.startswith(_STAGED):
        what = "puts an object there before it gets its name"
        release = "when it is whole; the owner's upkeep or `quire verify --sweep` removes what is an hour old"
        return _answer(path, look, Holder("store", "a writer", what, release))
    if _PROBE.fullmatch(path):
        what, release = "has put it there to see whether it comes back", "when it ends; what is left may be deleted"
        return _answer(path, look, Holder("store", "quire doctor", what, release))
    if path == _UNFINISHED or (isinstance(stem, names.FixedFile) and path.endswith(names.TEMPORARY)):
        return _answer(
            path, look, Holder("store", "the owner", WRITES, f"when it is whole; what is left, {OWNER_OPENS}")
        )
    return _of_stream(txn, path, look) or _of_lsm(txn, path, look) or _of_pages(txn, path, look)


def _answer(path: str, look: Look | None, holder: Holder) -> Answer:
    return Answer(path, "file", "comes and goes by itself", size_of(path, look), 0, (holder,))


def _of_stream(txn: ReadTxn, path: str, look: Look | None) -> Answer | None:
    if (match := _OF_STREAM.fullmatch(path)) is None:
        return None
    stream_id = int(match["id"])
    if stream_id <= U64_MAX and path == names.state_path(stream_id):
        what = "remembers in it its consumers, its retention, and in which mode it was last open"
        return owned(txn, path, "file", stream_id, (what, "quire drop {name}"), look)
    if _SPARE.search(path):
        told = ("has it ready as its next segment", "when the stream is closed, or opened the next time")
        return owned(txn, path, "file", stream_id, told, look)
    if path.endswith(names.TEMPORARY):
        return owned(txn, path, "file", stream_id, (WRITES, _opened("stream")), look)
    return None


def _of_lsm(txn: ReadTxn, path: str, look: Look | None) -> Answer | None:
    if (match := _OF_LSM.fullmatch(path)) is None:
        return None
    db_id, rest = int(match["id"], 16), match["rest"]
    if version := _SNAPSHOT.fullmatch(rest):
        return _of_version(txn, path, db_id, int(version["number"]), look)
    folder, _, name = rest.partition("/")
    if folder == "loads" and names.load_number(name) is not None:
        what = "remembers in it what became of a bulk load, for a client that asks again"
        return owned(txn, path, "file", db_id, (what, "when a thousand newer loads are over"), look)
    if path.endswith(names.TEMPORARY):
        return owned(txn, path, "file", db_id, (WRITES, _opened("database")), look)
    return None


def _of_version(txn: ReadTxn, path: str, db_id: int, number: int, look: Look | None) -> Answer:
    """A file of a snapshot: mostly another name of a table that the database has, or had."""
    held = [
        snapshot_holder(txn, db_id, snapshot_id, row, "has it as part of the database as it was")
        for (_, snapshot_id), row in txn.scan(t.SNAPSHOT_INDEX, db_id)
        if row.anchor_segment_id == number
    ]
    if not held:
        told = ("had it for a snapshot that was dropped", "the owner's upkeep, or the next use of a key-value database")
        return owned(txn, path, "file", db_id, told, look)
    return Answer(path, "file", "in use", size_of(path, look), 0, tuple(held))


def _of_pages(txn: ReadTxn, path: str, look: Look | None) -> Answer | None:
    if (match := _OF_PAGES.fullmatch(path)) is None or not path.endswith(names.TEMPORARY):
        return None
    told = (WRITES, "when it is whole; what is left, by the owner's upkeep when it is an hour old")
    return owned(txn, path, "file", int(match["id"], 16), told, look)


def _opened(what: str) -> str:
    return f"when it is whole; what is left, when the {what} is opened the next time"
