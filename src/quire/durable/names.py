"""Builds *and* parses every file name in a store and the object keys of artifacts (`object_names.py` has the other keys).

Building and parsing are inverse: `parse_path(name.path) == name`, and any text that parses is exactly what the parsed name
builds, so no two texts have the same meaning (no upper-case hex, no other widths, no superfluous zeros). Foreign text parses to
`None` and never raises: users may put their own files into a directory. Paths are relative to the store's directory, keys to
their namespace's prefix. Names of databases, snapshots and cursors are chosen by users (`check_name`) and never become file
names.

Threads: any; pure functions and values, importable on executors. The architecture page shows the whole tree. Raises
`OutOfRange` for an id that does not fit, `InvalidInput` for an artifact that has no object, `InvalidName`.

    >>> WalSegmentFile(db_id=7, segment_id=31).path
    'pages/00000007/wal/0000001f.seg'
    >>> parse_path("pages/00000007/wal/0000001f.seg")
    WalSegmentFile(db_id=7, segment_id=31)
    >>> spare_path(7, 2), LsmHome(lsm_home(7)).wal(31), lsm_number("000031.log", ".log")
    ('streams/7/hot/spare-2.seg.tmp', 'lsm/00000007/wal/000031.log', 31)
    >>> object_key(ArtifactKey(origin_db_id=7, kind=ArtifactKind.DELTA, id=2, generation=9, delta_id=3))
    '00000007/00000002/delta-0003:00000009'
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Collection
from enum import StrEnum
from fnmatch import fnmatchcase
from uuid import UUID

import msgspec

from quire.core.errors import InvalidInput, InvalidName
from quire.core.ids import U64_MAX, ArtifactKey, ArtifactKind, some_u32, u16, u32, u64
from quire.core.limits import NAME_BYTES_MAX

CONFIG = "quire.toml"
LOCK = "store.lock"
MANIFEST = "manifest.lmdb"
MANIFEST_LOCK = "manifest.lmdb-lock"
MANIFEST_CHECKED = "manifest.lmdb-checked"
SOCKET = "quire.sock"
FRAMES_SOCKET = "quire.sock.f"
SOCKET_POINTER = "quire.sock.at"
"""Contains the path of the socket if the path of the store is too long for one."""
ADMIN_TOKEN = "admin.token"
READ_TOKEN = "read.token"
"""`admin.token` and `read.token` authenticate clients on the network."""
SIGNING_KEY = "jwt.key"
"""Signs the tokens of single databases (W5)."""
ORIGIN = "restored.json"
"""Records what the directory was restored from (`archive/state_files.py`)."""
STANDBY = "standby.json"
"""The position of a standby; while this file exists, only the standby writes to the directory."""
REPLAYED = ".files"
"""Files by number, as a restore or a standby builds them (`archive/replay.py`)."""
KEPT = ".kept"
"""Files that a standby's owner has removed and the standby's readers still use (`archive/kept_files.py`)."""
READERS = "readers"
PAGES = "pages"
STREAMS = "streams"
LSM = "lsm"
OBJECTS = "objects"
SCRATCH = "scratch"
QUARANTINE = "quarantine"
"""Files that recovery would have removed but could not prove to be garbage: see `quire.durable.quarantine`."""
TEMPORARY = ".tmp"
"""The suffix that `files.write_atomic` uses while it writes; the owner of the directory sweeps such files at start."""


# ── directories ───────────────────────────────────────────────────────────────────────────────────────────────────────
def pages_wal_dir(db_id: int) -> str:
    """Return the directory of a page database's WAL segments."""
    return f"{PAGES}/{some_u32('db_id', db_id):08x}/wal"


def pages_cache_dir(db_id: int) -> str:
    """Return the directory of a page database's hot copies of chunks."""
    return f"{PAGES}/{some_u32('db_id', db_id):08x}/cache"


def lsm_home(db_id: int) -> str:
    """Return the directory of a key-value database, to which the paths in its manifest are relative."""
    return f"{LSM}/{some_u32('db_id', db_id):08x}"


def lsm_dir(db_id: int, part: str) -> str:
    """Return a key-value database's `manifest`, `wal` or `sst` directory."""
    assert part in ("manifest", "wal", "sst"), part
    return f"{lsm_home(db_id)}/{part}"


def lsm_snapshot_dir(db_id: int, number: int) -> str:
    """Return the directory of the links of a key-value database's snapshot."""
    return f"{lsm_home(db_id)}/snapshots/{u64('number', number):06d}"


MODE_FILE = f"{STREAMS}/manifest_log.json"
"""How far the manifest logs of all streams are trusted: {"mode": "off" | "shadow" | "on"}."""


def stream_home(stream_id: int) -> str:
    """Return the directory of a stream."""
    return f"{STREAMS}/{u64('stream_id', stream_id)}"


def stream_dir(stream_id: int, part: str) -> str:
    """Return a stream's `hot`, `warm` or `manifest` directory."""
    assert part in ("hot", "warm", "manifest"), part
    return f"{stream_home(stream_id)}/{part}"


def scratch_dir(job_id: int) -> str:
    """Return the staging directory of a job; removed after its commit, swept at start-up."""
    return f"{SCRATCH}/{u64('job_id', job_id)}"


# ── files ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
class FixedFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file with a fixed name: config, lock, manifest, socket, token."""

    name: str

    @property
    def path(self) -> str:
        assert self.name in FIXED_FILES, self.name
        return self.name


FIXED_FILES = frozenset(
    {
        CONFIG,
        LOCK,
        MANIFEST,
        MANIFEST_LOCK,
        MANIFEST_CHECKED,
        SOCKET,
        FRAMES_SOCKET,
        SOCKET_POINTER,
        ADMIN_TOKEN,
        READ_TOKEN,
        SIGNING_KEY,
    }
)


class LeaseFile(msgspec.Struct, frozen=True, kw_only=True):
    """The lease of a read-only process, held by `flock`."""

    reader: UUID

    @property
    def path(self) -> str:
        return f"{READERS}/{self.reader}.lease"


class WalSegmentFile(msgspec.Struct, frozen=True, kw_only=True):
    """A WAL segment of a page database."""

    db_id: int
    segment_id: int

    @property
    def path(self) -> str:
        return f"{pages_wal_dir(self.db_id)}/{u32('segment_id', self.segment_id):08x}.seg"


class FollowFile(msgspec.Struct, frozen=True, kw_only=True):
    """The position of a page database in the SQLite file that it follows."""

    db_id: int

    @property
    def path(self) -> str:
        return f"{PAGES}/{some_u32('db_id', self.db_id):08x}/follow.json"


class CachedChunkFile(msgspec.Struct, frozen=True, kw_only=True):
    """A hot copy of a chunk artifact; its path below the cache directory is its object key."""

    db_id: int
    key: ArtifactKey

    @property
    def path(self) -> str:
        return f"{pages_cache_dir(self.db_id)}/{object_key(self.key)}"


class Tier(StrEnum):
    """The local tiers of a stream."""

    HOT = "hot"
    WARM = "warm"


class StreamSegmentFile(msgspec.Struct, frozen=True, kw_only=True):
    """A segment of a stream in one of its local tiers; segment ids of streams are u64, as in the log's records."""

    stream_id: int
    tier: Tier
    segment_id: int

    @property
    def path(self) -> str:
        return f"{stream_dir(self.stream_id, self.tier)}/{u64('segment_id', self.segment_id):016x}.seg"


class ManifestLogFile(msgspec.Struct, frozen=True, kw_only=True):
    """A chunk of a stream's manifest log; `temporary` until its first record commits."""

    stream_id: int
    chunk_index: int
    temporary: bool = False

    @property
    def path(self) -> str:
        suffix = TEMPORARY if self.temporary else ""
        return f"{stream_dir(self.stream_id, 'manifest')}/{u64('chunk_index', self.chunk_index)}.mlog{suffix}"


class ManifestLogSnapshotFile(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot next to the chunks of a stream's manifest log."""

    stream_id: int
    snapshot_id: int

    @property
    def path(self) -> str:
        return f"{stream_dir(self.stream_id, 'manifest')}/snapshot_{u64('snapshot_id', self.snapshot_id)}.bin"


class ManifestLogLock(msgspec.Struct, frozen=True, kw_only=True):
    """The lock of the one writer of a stream's manifest log."""

    stream_id: int

    @property
    def path(self) -> str:
        return f"{stream_dir(self.stream_id, 'manifest')}/writer.lock"


class LsmManifestLogFile(msgspec.Struct, frozen=True, kw_only=True):
    """An event log of a key-value database's manifest; number 0 is the one in use."""

    db_id: int
    number: int = 0

    @property
    def path(self) -> str:
        return f"{lsm_dir(self.db_id, 'manifest')}/{u64('number', self.number):06d}.log"


class LsmManifestSnapshotFile(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of a key-value database's manifest; number 1 is the one in use."""

    db_id: int
    number: int = 1

    @property
    def path(self) -> str:
        return f"{lsm_dir(self.db_id, 'manifest')}/MANIFEST-{u64('number', self.number):06d}"


class LsmWalFile(msgspec.Struct, frozen=True, kw_only=True):
    """A write-ahead log of a key-value database."""

    db_id: int
    number: int

    @property
    def path(self) -> str:
        return f"{lsm_dir(self.db_id, 'wal')}/{u64('number', self.number):06d}.log"


class SstFile(msgspec.Struct, frozen=True, kw_only=True):
    """A sorted table of a key-value database."""

    db_id: int
    sst_id: int

    @property
    def path(self) -> str:
        return f"{lsm_dir(self.db_id, 'sst')}/{u64('sst_id', self.sst_id):06d}.sst"


class ScratchDir(msgspec.Struct, frozen=True, kw_only=True):
    """The staging directory of a job."""

    job_id: int

    @property
    def path(self) -> str:
        return scratch_dir(self.job_id)


class QuarantineNote(msgspec.Struct, frozen=True, kw_only=True):
    """The note of a quarantined file: its original path and why it was moved."""

    number: int

    @property
    def path(self) -> str:
        return f"{QUARANTINE}/{some_u32('number', self.number):08x}.json"


class QuarantinedFile(msgspec.Struct, frozen=True, kw_only=True):
    """A quarantined file or directory, stored under its number and its original path."""

    number: int
    original: str

    @property
    def path(self) -> str:
        return f"{QUARANTINE}/{some_u32('number', self.number):08x}/{self.original}"


StoreName = (
    FixedFile
    | LeaseFile
    | WalSegmentFile
    | FollowFile
    | CachedChunkFile
    | StreamSegmentFile
    | ManifestLogFile
    | ManifestLogSnapshotFile
    | ManifestLogLock
    | LsmManifestLogFile
    | LsmManifestSnapshotFile
    | LsmWalFile
    | SstFile
    | ScratchDir
    | QuarantineNote
    | QuarantinedFile
)

_HEX8 = "([0-9a-f]{8})"
_HEX16 = "([0-9a-f]{16})"
_NUMBER = "(0|[1-9][0-9]{0,19})"
_NUMBER6 = "([0-9]{6}|[1-9][0-9]{6,19})"
_UUID = "([0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12})"

_Parts = tuple[str, ...]
_PATTERNS: tuple[tuple[str, Callable[[_Parts], StoreName | None]], ...] = (
    (f"{READERS}/{_UUID}\\.lease", lambda p: LeaseFile(reader=UUID(p[0]))),
    (f"{PAGES}/{_HEX8}/wal/{_HEX8}\\.seg", lambda p: WalSegmentFile(db_id=_hex(p[0]), segment_id=_hex(p[1]))),
    (f"{PAGES}/{_HEX8}/follow\\.json", lambda p: FollowFile(db_id=_hex(p[0]))),
    (f"{PAGES}/{_HEX8}/cache/(.+)", lambda p: _cached(_hex(p[0]), p[1])),
    (
        f"{STREAMS}/{_NUMBER}/(hot|warm)/{_HEX16}\\.seg",
        lambda p: StreamSegmentFile(stream_id=int(p[0]), tier=Tier(p[1]), segment_id=_hex(p[2])),
    ),
    (
        f"{STREAMS}/{_NUMBER}/manifest/{_NUMBER}\\.mlog(\\.tmp)?",
        lambda p: ManifestLogFile(stream_id=int(p[0]), chunk_index=int(p[1]), temporary=bool(p[2])),
    ),
    (
        f"{STREAMS}/{_NUMBER}/manifest/snapshot_{_NUMBER}\\.bin",
        lambda p: ManifestLogSnapshotFile(stream_id=int(p[0]), snapshot_id=int(p[1])),
    ),
    (f"{STREAMS}/{_NUMBER}/manifest/writer\\.lock", lambda p: ManifestLogLock(stream_id=int(p[0]))),
    (
        f"{LSM}/{_HEX8}/manifest/{_NUMBER6}\\.log",
        lambda p: LsmManifestLogFile(db_id=_hex(p[0]), number=int(p[1])),
    ),
    (
        f"{LSM}/{_HEX8}/manifest/MANIFEST-{_NUMBER6}",
        lambda p: LsmManifestSnapshotFile(db_id=_hex(p[0]), number=int(p[1])),
    ),
    (f"{LSM}/{_HEX8}/wal/{_NUMBER6}\\.log", lambda p: LsmWalFile(db_id=_hex(p[0]), number=int(p[1]))),
    (f"{LSM}/{_HEX8}/sst/{_NUMBER6}\\.sst", lambda p: SstFile(db_id=_hex(p[0]), sst_id=int(p[1]))),
    (f"{SCRATCH}/{_NUMBER}", lambda p: ScratchDir(job_id=int(p[0]))),
    (f"{QUARANTINE}/{_HEX8}\\.json", lambda p: QuarantineNote(number=_hex(p[0]))),
    (f"{QUARANTINE}/{_HEX8}/(.+)", lambda p: QuarantinedFile(number=_hex(p[0]), original=p[1])),
)


def parse_path(path: str) -> StoreName | None:
    """Return the name that a path in a store stands for; `None` if it is foreign."""
    if path in FIXED_FILES:
        return FixedFile(name=path)
    for pattern, build in _PATTERNS:
        if match := re.fullmatch(pattern, path):  # `re` compiles and caches at first use, which keeps the import fast
            name = build(match.groups())
            return name if name is not None and _fits(name, path) else None
    return None


# ── object keys ───────────────────────────────────────────────────────────────────────────────────────────────────────
_OBJECT = f"{_HEX8}/{_HEX8}/(base|wal|delta-([0-9a-f]{{4}})):{_HEX8}"


def object_key(key: ArtifactKey) -> str:
    """Return an artifact's object key; leaves and namespaces have rows only and raise `InvalidInput`."""
    if key.kind is ArtifactKind.BASE:
        variant = "base"
    elif key.kind is ArtifactKind.DELTA:
        variant = f"delta-{u16('delta_id', key.delta_id):04x}"
    elif key.kind is ArtifactKind.WAL:
        variant = "wal"
    else:
        raise InvalidInput("only base chunks, deltas and WAL segments have objects", key=key)
    if key.delta_id and key.kind is not ArtifactKind.DELTA:
        raise InvalidInput("only a delta has a delta_id", key=key)
    origin, slot = some_u32("origin_db_id", key.origin_db_id), u32("id", key.id)
    return f"{origin:08x}/{slot:08x}/{variant}:{u32('generation', key.generation):08x}"


def parse_object_key(text: str) -> ArtifactKey | None:
    """Return the artifact that an object key names; `None` if it is foreign."""
    match = re.fullmatch(_OBJECT, text)
    if match is None or _hex(match[1]) == 0:
        return None
    kind = {"b": ArtifactKind.BASE, "d": ArtifactKind.DELTA, "w": ArtifactKind.WAL}[match[3][0]]
    return ArtifactKey(
        origin_db_id=_hex(match[1]),
        kind=kind,
        id=_hex(match[2]),
        generation=_hex(match[5]),
        delta_id=_hex(match[4]) if match[4] else 0,
    )


# ── below one stream or key-value database ────────────────────────────────────────────────────────────────────────────
def state_path(stream_id: int) -> str:
    """Return the path of a stream's state that is not in its log: consumers, retention, the mode it was last opened in."""
    return f"{stream_home(stream_id)}/stream.json"


def spare_path(stream_id: int, number: int) -> str:
    """Return the path of a spare file for a future segment. Its suffix has it swept when the stream is opened."""
    return f"{stream_dir(stream_id, 'hot')}/spare-{u64('number', number)}.seg{TEMPORARY}"


def parse_segment_name(name: str) -> int | None:
    """Return the id of the segment whose file has this name in `hot/` or `warm/`; `None` if it is foreign."""
    match = re.fullmatch(f"{_HEX16}\\.seg", name)
    return None if match is None else int(match[1], 16)


def parse_stream_home(name: str) -> int | None:
    """Return the id of the stream whose directory has this name; `None` if it is foreign."""
    return int(name) if re.fullmatch(_NUMBER, name) else None


class LsmHome(msgspec.Struct, frozen=True):
    """The files of a key-value database, or of a snapshot of one, below the directory `path`. Both have the same layout, and
    paths in a manifest are relative to it: a copy of the manifest next to links to the tables is a database."""

    path: str

    @property
    def manifest_log(self) -> str:
        return f"{self.path}/manifest/000000.log"

    @property
    def manifest_snapshot(self) -> str:
        return f"{self.path}/manifest/MANIFEST-000001"

    def wal(self, number: int) -> str:
        return f"{self.path}/wal/{u64('number', number):06d}.log"

    def sst(self, sst_id: int) -> str:
        return f"{self.path}/{sst_entry_path(sst_id)}"

    def load(self, number: int) -> str:
        """Return the path of the note about a bulk load."""
        return f"{self.path}/loads/{u64('number', number):016x}.json"


def sst_entry_path(sst_id: int) -> str:
    """Return a table's path as stored in the manifest of its database, relative to the database's directory."""
    return f"sst/{u64('sst_id', sst_id):06d}.sst"


def lsm_number(name: str, suffix: str) -> int | None:
    """Return the number in the name of a key-value database's WAL (`.log`) or table (`.sst`); `None` if it is foreign."""
    match = re.fullmatch(_NUMBER6, name.removesuffix(suffix)) if name.endswith(suffix) else None
    return int(match[1]) if match is not None and int(match[1]) <= U64_MAX else None


def load_number(name: str) -> int | None:
    """Return the number in the name of a note about a bulk load; `None` if it is foreign."""
    match = re.fullmatch(f"{_HEX16}\\.json", name)
    return int(match[1], 16) if match is not None else None


# ── names chosen by users ─────────────────────────────────────────────────────────────────────────────────────────────
def matches_any(name: str, patterns: Collection[str]) -> bool:
    """Return whether a name is one of these, or matches one of them as a pattern."""
    return name in patterns or any(fnmatchcase(name, pattern) for pattern in patterns)


def check_name(kind: str, name: str) -> str:
    """Return `name` if it is valid for a database, snapshot or cursor; `kind` is used in error messages.

    A name has 1 to 200 bytes of UTF-8; no control characters or line breaks; no `/`; no space at either end; and is not `.` or
    `..`.

    >>> check_name("database", "größe 1")
    'größe 1'
    >>> check_name("snapshot", "a/b")
    Traceback (most recent call last):
        ...
    quire.core.errors.InvalidName: a snapshot's name may not contain '/' (name='a/b'); use '-' or '.' instead
    """
    if not isinstance(name, str):
        raise InvalidName(f"a {kind}'s name must be a str", hint="decode it first", type=type(name).__name__)
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        raise InvalidName(
            f"a {kind}'s name is not valid Unicode", hint="decode it as UTF-8", name=ascii(name)
        ) from None
    if not 1 <= size <= NAME_BYTES_MAX:
        hint = f"use 1 to {NAME_BYTES_MAX} bytes of UTF-8"
        raise InvalidName(f"a {kind}'s name is empty or too long", hint=hint, name=name[:40], size=size)
    if "/" in name:
        raise InvalidName(f"a {kind}'s name may not contain '/'", hint="use '-' or '.' instead", name=name)
    if any(unicodedata.category(character) in ("Cc", "Zl", "Zp") for character in name):
        hint = "remove tabs, line breaks and the like"
        raise InvalidName(f"a {kind}'s name may not contain control characters", hint=hint, name=name)
    if name != name.strip():
        raise InvalidName(f"a {kind}'s name may not start or end with a space", hint="remove the space", name=name)
    if name in (".", ".."):
        raise InvalidName(f"a {kind} may not be called {name!r}", hint="choose another name", name=name)
    return name


def _hex(digits: str) -> int:
    return int(digits, 16)


def _cached(db_id: int, text: str) -> CachedChunkFile | None:
    key = parse_object_key(text)
    return None if key is None else CachedChunkFile(db_id=db_id, key=key)


def _fits(name: StoreName, path: str) -> bool:
    """Return whether `name` builds exactly `path`: ids of 0 or beyond u64 make a path foreign."""
    try:
        return name.path == path
    except InvalidInput:
        return False
