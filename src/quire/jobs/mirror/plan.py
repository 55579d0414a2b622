"""The plan of a mirror's run: which files of the target are rewritten for databases that changed (L3).

A database that changed is read again completely. Databases that share a file with it are copied from that file. The output is
cut into files of about `file_bytes`, in the order of the databases' names.

Threads: any; pure functions of the state of manifest and target.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from itertools import chain

from msgspec.structs import replace

from quire.jobs.mirror.change_detection import Differences
from quire.jobs.mirror.run import Column, Source, Written, WrittenFile, fits
from quire.jobs.runner import balanced
from quire.manifest.records import MirrorDatabaseRecord
from quire.pages.view import SnapshotView

TASKS_PER_CORE = 4
SOURCE_BYTES = 64 << 10
"""Minimum cost of a source, as a number of bytes: opening a database takes a few milliseconds."""


def sources(
    views: Mapping[int, tuple[str, SnapshotView]], gone: Collection[int], held: Mapping[int, MirrorDatabaseRecord]
) -> tuple[list[Source], set[str]]:
    """Return (the sources to write, the files that they replace)."""
    replaced = {path for db_id in (*views, *gone) if db_id in held for path in held[db_id].files}
    written = [
        Source(db_id=db_id, database=name, view=view, weight_bytes=view.size_pages * view.page_size)
        for db_id, (name, view) in views.items()
    ]
    for db_id, row in held.items():
        shared = tuple(path for path in row.files if path in replaced)
        if shared and db_id not in views and db_id not in gone:
            written.append(Source(db_id=db_id, database=row.name, files=shared, weight_bytes=row.size_bytes))
    return sorted(written, key=lambda source: source.database), replaced


def units(written: Iterable[Source], file_bytes: int) -> list[tuple[Source, ...]]:
    """Group sources, in order, into units that become one file each."""
    cut: list[tuple[Source, ...]] = []
    waiting: list[Source] = []
    size = 0
    for source in written:
        if waiting and size + source.weight_bytes > file_bytes:
            cut.append(tuple(waiting))
            waiting, size = [], 0
        waiting.append(source)
        size += source.weight_bytes
    return [*cut, tuple(waiting)] if waiting else cut


def distribute_units(cut: list[tuple[Source, ...]], width: int) -> list[tuple[tuple[Source, ...], ...]]:
    """Distribute units over as many tasks as the cores can use (L2), each with about the same work."""
    weights = [sum(source.weight_bytes + SOURCE_BYTES for source in unit) for unit in cut]
    count = min(len(cut), TASKS_PER_CORE * width)
    tasks: list[list[tuple[Source, ...]]] = [[] for _ in range(count)]
    for unit, task in zip(cut, balanced(weights, count), strict=True):
        tasks[task].append(unit)
    return [tuple(task) for task in tasks]


def batch_rows(
    differ: Differences,
    views: Mapping[int, tuple[str, SnapshotView]],
    held: Mapping[int, MirrorDatabaseRecord],
    replaced: Set[str],
    files: Iterable[WrittenFile],
) -> list[tuple[int, MirrorDatabaseRecord]]:
    """Return, for each database of a batch, what the target holds of it after the batch."""
    places: dict[int, list[str]] = defaultdict(list)
    rows: dict[int, int] = defaultdict(int)
    sizes: dict[int, int] = defaultdict(int)
    for file in files:
        for db_id, count in file.databases:
            places[db_id].append(file.path)
            rows[db_id] += count
            sizes[db_id] += file.size_bytes * count // max(file.rows, 1)
    batch = [
        (db_id, MirrorDatabaseRecord(name, view.lsn, rows[db_id], places[db_id], size_bytes=sizes[db_id]))
        for db_id, (name, view) in views.items()
    ]
    for db_id, row in held.items():
        if db_id not in views and db_id not in differ.gone and not replaced.isdisjoint(row.files):
            kept = [path for path in row.files if path not in replaced]
            batch.append((db_id, replace(row, files=[*kept, *places[db_id]])))
    batch += [(db_id, replace(row, is_gone=True, files=[])) for db_id, row in differ.gone.items()]
    return sorted(batch, key=lambda item: item[0])


def merged_columns(known: Iterable[Column], written: Sequence[Written]) -> tuple[list[Column], bool]:
    """Return (the target's columns and those that the files need, whether files were written with different columns).

    A new column gets the type, of those that databases want, that takes the values of most of them: numbers are widened to
    `double` also if another database has BLOBs there.
    """
    columns = {name.lower(): (name, kind) for name, kind in known}
    wanted: dict[str, dict[Column, None]] = defaultdict(dict)
    for column in chain.from_iterable(task.wanted for task in written):
        wanted[column[0].lower()][column] = None
    for name, candidates in wanted.items():
        if name not in columns:
            columns[name] = max(candidates, key=lambda wide: sum(fits(kind, wide[1]) for _, kind in candidates))
    agreed = dict(columns)
    for name, kind in chain.from_iterable(task.columns for task in written):
        if columns.setdefault(name.lower(), (name, kind)) != (name, kind):
            return list(agreed.values()), True
    return list(columns.values()), False
