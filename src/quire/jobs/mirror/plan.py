"""What a run of a mirror writes: which files of the target are rewritten for databases that changed (L3).

A database that changed is read anew, whole. Others that share a file with it are copied from that file. What is written is cut
into files of about `file_bytes`, in the order of the databases' names.

Pure functions of what manifest and target say. Any thread.
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
"""What a source costs at least, as if it were so many bytes: opening a database takes a few milliseconds."""


def sources(
    views: Mapping[int, tuple[str, SnapshotView]], gone: Collection[int], held: Mapping[int, MirrorDatabaseRecord]
) -> tuple[list[Source], set[str]]:
    """(what is written, the files that it takes the place of)."""
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
    """Sources that become one file each, in their order."""
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


def heaps(cut: list[tuple[Source, ...]], width: int) -> list[tuple[tuple[Source, ...], ...]]:
    """Units as so many tasks as cores can use (L2), each with about the same work."""
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
    """What the target holds of each database of a batch, once it holds the batch."""
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
    """(the target's columns with all that files need, whether the files were written with others).

    A new column gets the widest of the types that databases want, if there is one that takes all values; else the first.
    """
    columns = {name.lower(): (name, kind) for name, kind in known}
    wanted: dict[str, dict[Column, None]] = defaultdict(dict)
    for column in chain.from_iterable(task.wanted for task in written):
        wanted[column[0].lower()][column] = None
    for name, candidates in wanted.items():
        if name not in columns:
            columns[name] = next(
                (wide for wide in candidates if all(fits(kind, wide[1]) for _, kind in candidates)),
                next(iter(candidates)),
            )
    agreed = dict(columns)
    for name, kind in chain.from_iterable(task.columns for task in written):
        if columns.setdefault(name.lower(), (name, kind)) != (name, kind):
            return list(agreed.values()), True
    return list(columns.values()), False
