"""A mirror's target as plain Parquet files, with a manifest that lists the live ones: docs/formats/mirror-manifest.md.

A commit creates the next version of the manifest: if the name is taken, another commit came first. `manifest.json` is a copy of
the newest version, for readers that do not want to list; after a kill it may be one commit behind until the next run. A version
names its files; a file that it no longer names is deleted `keep_seconds` later, as are files left by killed runs.

Raises `StalePlan`, `Corruption` for a manifest that is damaged, `FormatTooNew`.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import closing

import msgspec

from quire.core.clock import Clock
from quire.core.decoding import described
from quire.core.errors import AlreadyExists, Corruption, FormatTooNew, InvalidInput, ObjectNotFound, StalePlan
from quire.durable.failpoints import hit
from quire.jobs.mirror.run import Column, WrittenFile
from quire.jobs.mirror.target import DATA, FileSize, TargetState
from quire.objects.api import DeletableStore, ObjectStore, list_objects
from quire.objects.open import open_store

FORMAT = 1
VERSIONS = "_manifest"
NEWEST = "manifest.json"
KEEP_SECONDS, KEEP_SECONDS_MIN = 86_400, 3_600
VERSIONS_KEPT = 100
OWN_NAME = re.compile(rf"{DATA}/[0-9]{{8,}}-[0-9]{{5}}-[0-9]{{4}}-[0-9a-f]{{16}}\.parquet")
"""The names of the mirror's files: no other file is deleted."""


class ManifestFile(msgspec.Struct, frozen=True):
    """A file of the table."""

    path: str
    size_bytes: int
    rows: int


class RemovedFile(msgspec.Struct, frozen=True):
    """A file that no longer belongs to the table."""

    path: str
    at_ms: int


class TableManifest(msgspec.Struct, frozen=True, kw_only=True):
    """A version of the table."""

    format: int
    version: int
    app_id: str
    batch_id: int
    committed_at_ms: int
    columns: list[tuple[str, str]]
    files: list[ManifestFile]
    removed: list[RemovedFile] = []
    digest: str = ""
    """SHA-256, in hexadecimal, of the manifest with this field empty; always the last field."""


class _Format(msgspec.Struct):
    format: int


def encode(manifest: TableManifest) -> bytes:
    """Encode a manifest, with its digest."""
    return encode_digest(msgspec.json.encode(msgspec.structs.replace(manifest, digest="")))


def decode(data: bytes, name: str) -> TableManifest:
    """Decode a manifest; `Corruption` if any byte was changed."""
    plain = data[: -len(_END) - DIGEST_CHARACTERS] + _END
    if encode_digest(plain) != data:
        raise Corruption("the manifest of a mirror is damaged: its digest does not match", hint=_HINT, name=name)
    try:
        if msgspec.json.decode(data, type=described(_Format)).format > FORMAT:
            raise FormatTooNew("the manifest of the mirror has a newer format", hint="upgrade quire", name=name)
        return msgspec.json.decode(data, type=described(TableManifest))
    except msgspec.MsgspecError as error:
        raise Corruption(f"the manifest of a mirror is invalid: {error}", hint=_HINT, name=name) from error


def encode_digest(plain: bytes) -> bytes:
    """Insert the digest into an encoded manifest whose last field is an empty digest."""
    return plain[: -len(_END)] + hashlib.sha256(plain).hexdigest().encode() + _END


DIGEST_CHARACTERS = 64
_END = b'"}'


_HINT = "remove the damaged version: the next run continues from the one before it"


def open_table(where: str, app_id: str, options: Mapping[str, str], clock: Clock) -> ParquetTarget:
    """Open the table in this directory."""
    return ParquetTarget(where, app_id, options, clock)


class ParquetTarget:
    """A target that is a directory of Parquet files."""

    def __init__(self, location: str, app_id: str, options: Mapping[str, str], clock: Clock) -> None:
        self.location = location if "://" in location else os.path.abspath(location)
        self._app_id = app_id
        self._clock = clock
        keep = options.get("keep_seconds", str(KEEP_SECONDS))
        if unknown := set(options) - {"keep_seconds"}:
            raise InvalidInput("a Parquet target has no such option", hint="options: keep_seconds", options=unknown)
        if not keep.isdecimal() or int(keep) < KEEP_SECONDS_MIN:
            hint = f"at least {KEEP_SECONDS_MIN}: files of a run that has not committed yet are as old as the run"
            raise InvalidInput("keep_seconds must be a number of seconds", hint=hint, keep_seconds=keep)
        self._keep_ms = int(keep) * 1000
        self._manifest: TableManifest | None = None

    def read(self) -> TargetState | None:
        """See `Target`."""
        with closing(open_store(self.location)) as store:
            self._manifest = manifest = newest(store)
            # A run that was killed after its commit has left an older copy, and this run may have nothing to commit.
            if manifest is not None and manifest.app_id == self._app_id and _copy(store) != (data := encode(manifest)):
                store.put(NEWEST, data)
        if manifest is None:
            return None
        files = {file.path: FileSize(file.size_bytes, file.rows) for file in manifest.files}
        return TargetState(self._own_batch(manifest), tuple(manifest.columns), files)

    def _own_batch(self, manifest: TableManifest) -> int:
        """Return the batch of this mirror that a version holds. An empty table may be one that another mirror has left."""
        return manifest.batch_id if manifest.app_id == self._app_id else 0

    def create(self) -> None:
        """See `Target`."""
        self._put(
            TableManifest(
                format=FORMAT,
                version=1,
                app_id=self._app_id,
                batch_id=0,
                committed_at_ms=self._clock.now_ms(),
                columns=[],
                files=[],
            )
        )

    def add_columns(self, columns: Sequence[Column]) -> None:
        """See `Target`."""
        before = self._before()
        self._put(msgspec.structs.replace(before, version=before.version + 1, columns=[*before.columns, *columns]))

    def commit(self, batch_id: int, add: Sequence[WrittenFile], remove: Sequence[str]) -> None:
        """See `Target`."""
        before, gone = self._before(), set(remove)
        if batch_id <= self._own_batch(before) or not gone <= {file.path for file in before.files}:
            raise StalePlan("the target holds a different batch", hint="plan it again", target=self.location)
        # Not the start of the run: queries read the replaced files until now, and have `keep_seconds` to finish.
        at_ms = self._clock.now_ms()
        horizon = at_ms - self._keep_ms
        kept = [file for file in before.files if file.path not in gone]
        removed = [file for file in before.removed if file.at_ms > horizon]
        after = msgspec.structs.replace(
            before,
            version=before.version + 1,
            app_id=self._app_id,
            batch_id=batch_id,
            committed_at_ms=at_ms,
            files=[*kept, *(ManifestFile(file.path, file.size_bytes, file.rows) for file in add)],
            removed=[*removed, *(RemovedFile(path, at_ms) for path in sorted(gone))],
        )
        self._put(after)
        with closing(open_store(self.location)) as store:
            # Only after this commit has won: what a losing plan would delete may be part of the winner's version.
            self._tidy(store, after, horizon)

    def _before(self) -> TableManifest:
        assert self._manifest is not None, "the table was read"
        return self._manifest

    def _put(self, manifest: TableManifest) -> None:
        data = encode(manifest)
        with closing(open_store(self.location)) as store:
            try:
                store.put(_name(manifest.version), data, create_only=True)
            except AlreadyExists as error:
                raise StalePlan("another commit came first", hint="plan it again", target=self.location) from error
            hit("jobs.mirror.version_created")
            # After the version, which is the commit: this copy may be behind the table, never ahead of it.
            store.put(NEWEST, data)
        self._manifest = manifest

    def _tidy(self, store: DeletableStore, manifest: TableManifest, horizon: int) -> None:
        """Delete files unneeded for `keep_seconds`: replaced files, files of killed runs, old versions."""
        needed = {file.path for file in manifest.files} | {file.path for file in manifest.removed}
        old = [
            file.key
            for file in list_objects(store, DATA)
            if OWN_NAME.fullmatch(file.key) and file.key not in needed and file.modified_ms < horizon
        ]
        versions = [file for file in list_objects(store, VERSIONS) if file.modified_ms < horizon]
        store.delete_many([*old, *(file.key for file in versions[:-VERSIONS_KEPT])])


def newest(store: ObjectStore) -> TableManifest | None:
    """Return the newest version of the table in a directory; `None` if there is none."""
    names = [file.key for file in list_objects(store, VERSIONS)]
    if not names:
        return None
    try:
        manifest = decode(store.get(names[-1]), names[-1])
    except ObjectNotFound as error:
        raise StalePlan("the newest version of the target was removed", hint="try again", name=names[-1]) from error
    if _name(manifest.version) != names[-1]:
        raise Corruption("the version in a mirror's manifest does not match its name", hint=_HINT, name=names[-1])
    return manifest


def _copy(store: ObjectStore) -> bytes:
    """Return the copy of the newest version; nothing if there is none."""
    try:
        return store.get(NEWEST)
    except ObjectNotFound:
        return b""


def _name(version: int) -> str:
    return f"{VERSIONS}/{version:016x}.json"
