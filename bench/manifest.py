"""The manifest against raw py-lmdb (its limit) and sqlite3 (a peer): the same rows, the same bytes, commits of the same size.

How the opponents are made fair: quire writes first. Then the rows in its environment are read back, and the raw contenders
write exactly these bytes, in the same order, in commits of the average size of quire's.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lmdb
import msgspec

import quire
from bench.report import Report, alternate, rate, seconds
from quire.manifest import tables as t
from quire.manifest.change import CHANGE_LOG, ChangeRecord
from quire.manifest.ops.artifacts import PutChunk
from quire.manifest.records import ChunkRecord, Residency
from quire.manifest.store import ManifestStore
from tests.manifest.checkpoints import FullChunk, checkpoint_ops

SHA = bytes(range(32))
BLOCK = 25
"""Commits in one turn of a contender."""


def chunk_op(number: int) -> PutChunk:
    """Return a small operation, which adds a chunk to the catalog."""
    return PutChunk(
        1,
        number,
        1,
        ChunkRecord(Residency.LOCAL, 67_108_864, 1_700_000_000_000 + number, number, number + 99, 16_384, sha256=SHA),
    )


def fresh(directory: Path, name: str) -> str:
    """Create an empty directory, and return the path of a manifest in it."""
    place = directory / name
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    return str(place / "manifest.lmdb")


def raw_env(directory: Path, name: str) -> tuple[lmdb.Environment, Any, Any]:
    """Open a new LMDB environment with quire's settings, one table and one log."""
    env = lmdb.open(fresh(directory, name), subdir=False, map_size=1 << 38, max_dbs=96, max_readers=1024, meminit=False)
    return env, env.open_db(b"chunk_catalog"), env.open_db(b"change_log")


# ── pipelined writes ──────────────────────────────────────────────────────────────────────────────────────────────────
class Pipelined:
    """A load of one producer that submits all operations and waits at the end."""

    def __init__(self, directory: Path, operations: int, batch: int) -> None:
        self.directory = directory
        self.operations = operations
        self.batch = batch
        self.per_commit = 1
        self.rows: list[tuple[bytes, bytes]] = []
        self.log: list[tuple[bytes, bytes]] = []

    def quire(self) -> float:
        """Return operations per second through `ManifestStore.submit`."""
        with ManifestStore.open(fresh(self.directory, "ours")) as manifest:
            manifest.register_db("bench", quire.DbKind.PAGES)
            commits = manifest.writer.stats.commits
            taken = seconds(lambda: self._produce(manifest))
            self.per_commit = max(1, round(self.operations / (manifest.writer.stats.commits - commits)))
            if not self.rows:
                with manifest.read() as txn:
                    self.rows = list(txn.raw_scan(t.CHUNK_CATALOG))
                    self.log = list(txn.raw_scan(CHANGE_LOG))[1:]
        return self.operations / taken

    def _produce(self, manifest: ManifestStore) -> None:
        size = self.batch
        guards = [
            manifest.submit(tuple([chunk_op(number) for number in range(start, start + size)]))
            for start in range(0, self.operations, size)
        ]
        for guard in guards:
            guard.result()

    def _groups(self) -> Iterator[tuple[list[tuple[bytes, bytes]], list[tuple[bytes, bytes]]]]:
        batches = max(1, self.per_commit // self.batch)
        for start in range(0, len(self.log), batches):
            yield self.rows[start * self.batch : (start + batches) * self.batch], self.log[start : start + batches]

    def raw_put(self) -> float:
        """Return operations per second of the limit: the same puts with `txn.put`."""
        env, table, log = raw_env(self.directory, "raw")

        def work() -> None:
            for rows, changes in self._groups():
                with env.begin(write=True) as txn:
                    for key, value in rows:
                        txn.put(key, value, db=table)
                    for key, value in changes:
                        txn.put(key, value, db=log)

        taken = seconds(work)
        env.close()
        return self.operations / taken

    def raw_putmulti(self) -> float:
        """Return operations per second with a C loop per commit, as in quire's writer."""
        env, table, log = raw_env(self.directory, "raw")

        def work() -> None:
            for rows, changes in self._groups():
                with env.begin(write=True) as txn:
                    txn.cursor(db=table).putmulti(rows)
                    txn.cursor(db=log).putmulti(changes, append=True)

        taken = seconds(work)
        env.close()
        return self.operations / taken

    def sqlite(self) -> float:
        """Return operations per second of the peer: the same rows in sqlite3, WAL, synchronous=FULL."""
        path = fresh(self.directory, "sqlite") + ".sqlite"
        con = sqlite3.connect(path, isolation_level=None)
        con.executescript(
            "PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL;"
            "CREATE TABLE chunk(key BLOB PRIMARY KEY, value BLOB) WITHOUT ROWID;"
            "CREATE TABLE log(sequence INTEGER PRIMARY KEY, value BLOB);"
        )

        def work() -> None:
            for rows, changes in self._groups():
                con.execute("BEGIN IMMEDIATE")
                con.executemany("INSERT INTO chunk VALUES (?, ?)", rows)
                con.executemany("INSERT INTO log VALUES (?, ?)", [(int.from_bytes(k, "big"), v) for k, v in changes])
                con.execute("COMMIT")

        taken = seconds(work)
        con.close()
        return self.operations / taken


def pipelined_writes(report: Report, directory: Path, quick: bool) -> None:
    """Submit operations without waiting, one by one and in batches of ten."""
    operations = 100_000 if quick else 1_000_000
    for batch, target in ((10, 0.6), (1, 0.45)):
        load = Pipelined(directory, operations, batch)
        ours, put, putmulti, sqlite = alternate(
            1 if quick else 3, load.quire, load.raw_put, load.raw_putmulti, load.sqlite
        )
        detail = f"{rate(ours)} against {rate(put)}, commits of {load.per_commit:,}"
        report.ratio(f"pipelined_{batch}_vs_lmdb_put", ours / put, target, "higher", detail)
        report.ratio(f"pipelined_{batch}_vs_lmdb_putmulti", ours / putmulti, None, "higher", rate(putmulti))
        report.ratio(
            f"pipelined_{batch}_vs_sqlite", ours / sqlite, 1.2 if batch == 10 else None, "higher", rate(sqlite)
        )
        report.figure(f"pipelined_{batch}_per_second", ours)


# ── awaited commits ───────────────────────────────────────────────────────────────────────────────────────────────────
def awaited_commits(report: Report, directory: Path, quick: bool) -> None:
    """Wait for each commit of one operation."""
    count = 500 if quick else 5_000
    env, table, log = raw_env(directory, "raw")
    encode = CHANGE_LOG.codec.encode
    rows = [
        (
            struct.pack(">III", 1, number, 1),
            t.CHUNK_CATALOG.codec.encode(chunk_op(number).record),
            struct.pack(">Q", number + 1),
            encode(ChangeRecord(number + 1, 1_700_000_000_000, (chunk_op(number),), ((3, number + 1),))),
        )
        for number in range(count)
    ]
    raw_times: list[float] = []
    our_times: list[float] = []
    with ManifestStore.open(fresh(directory, "ours")) as manifest:
        manifest.register_db("bench", quire.DbKind.PAGES)
        for start in range(0, count, BLOCK):  # short turns, because the speed of the disk changes within seconds
            for key, value, sequence, change in rows[start : start + BLOCK]:
                started = time.perf_counter()
                with env.begin(write=True) as txn:
                    txn.put(key, value, db=table)
                    txn.put(sequence, change, db=log)
                raw_times.append(time.perf_counter() - started)
            for number in range(start, start + BLOCK):
                op = chunk_op(number)
                started = time.perf_counter()
                manifest.submit((op,)).result()
                our_times.append(time.perf_counter() - started)
    env.close()
    ours, raw = statistics.median(our_times), statistics.median(raw_times)
    report.ratio(
        "single_commit_vs_lmdb", ours / raw, 1.3, "lower", f"p50 {ours * 1e6:.0f} µs against {raw * 1e6:.0f} µs"
    )
    report.figure("single_commit_p50_us", ours * 1e6)


def concurrent_commits(report: Report, directory: Path, quick: bool) -> None:
    """Wait for each commit, in 32 threads and in one."""
    duration = 0.5 if quick else 2.0

    def commits_per_second(threads: int) -> float:
        with ManifestStore.open(fresh(directory, "ours")) as manifest:
            manifest.register_db("bench", quire.DbKind.PAGES)
            done = [0] * threads
            stop = time.perf_counter() + duration

            def work(index: int) -> None:
                while time.perf_counter() < stop:
                    manifest.submit((chunk_op(index * 10_000_000 + done[index]),)).result()
                    done[index] += 1

            workers = [threading.Thread(target=work, args=(index,)) for index in range(threads)]
            started = time.perf_counter()
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
            return sum(done) / (time.perf_counter() - started)

    many, one = alternate(1 if quick else 3, lambda: commits_per_second(32), lambda: commits_per_second(1))
    report.ratio("32_threads_vs_one", many / one, 6, "higher", f"{rate(many)} against {rate(one)}")


# ── reads ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
def reads(report: Report, directory: Path, quick: bool) -> None:
    """Get rows, scan them, and export them as Arrow, against a transaction of py-lmdb that decodes the same rows."""
    count = 100_000 if quick else 1_000_000
    rounds = 1 if quick else 3
    with ManifestStore.open(fresh(directory, "ours")) as manifest:
        manifest.register_db("bench", quire.DbKind.PAGES)
        for start in range(0, count, 1_000):
            guard = manifest.submit(tuple([chunk_op(number) for number in range(start, start + 1_000)]))
        guard.result()
        step = 7919  # a prime, so that the keys are visited in no order
        numbers = [index * step % count for index in range(min(count, 200_000))]
        with manifest.read() as txn:
            handle, raw_txn = manifest.env.handles["chunk_catalog"], txn._txn
            pack, unpack = struct.Struct(">III").pack, msgspec.msgpack.Decoder(ChunkRecord).decode

            def raw_get() -> float:
                def work() -> None:
                    for number in numbers:
                        unpack(raw_txn.get(pack(1, number, 1), db=handle)[2:-4])

                return seconds(work) / len(numbers)

            def our_get() -> float:
                def work() -> None:
                    for number in numbers:
                        txn.get(t.CHUNK_CATALOG, 1, number, 1)

                return seconds(work) / len(numbers)

            def raw_scan() -> float:
                def work() -> None:
                    for _, raw in raw_txn.cursor(db=handle).iternext():
                        unpack(raw[2:-4])

                return seconds(work) / count

            def our_scan() -> float:
                def work() -> None:
                    for _ in txn.scan(t.CHUNK_CATALOG):
                        pass

                return seconds(work) / count

            def export() -> float:
                return seconds(lambda: txn.to_arrow("chunk_catalog")) / count

            export()  # not measured: it imports pyarrow
            one, one_raw = alternate(rounds, our_get, raw_get)
            report.ratio(
                "get_vs_lmdb_get", one / one_raw, 3, "lower", f"{one * 1e6:.2f} µs against {one_raw * 1e6:.2f} µs"
            )
            scan, arrow, scan_raw = alternate(rounds, our_scan, export, raw_scan)
            report.ratio(
                "scan_vs_lmdb_cursor", scan_raw / scan, 0.5, "higher", f"{rate(1 / scan)} against {rate(1 / scan_raw)}"
            )
            report.ratio("arrow_vs_lmdb_cursor", arrow / scan_raw, 2, "lower", f"{rate(1 / arrow)} rows")


# ── opening ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def opening(report: Report, directory: Path, quick: bool) -> None:
    """Open a manifest in a new process, against reading and decoding all of its rows."""
    databases, chunks = (1_000, 100_000) if quick else (10_000, 1_000_000)
    path = fresh(directory, "ours")
    with ManifestStore.open(path) as manifest:
        for number in range(databases):
            _fill(manifest, f"db-{number:05d}", chunks // databases)
    measured: list[dict[str, float]] = []

    def child(function: Callable[[str], None]) -> float:
        command = [sys.executable, "-m", "bench.manifest", function.__name__, path]
        answer = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        measured.append(answer)
        return float(answer["seconds"])

    ours, raw = alternate(1 if quick else 3, lambda: child(open_and_check), lambda: child(scan_and_decode))
    peak = max(figure["rss_mb"] for figure in measured[::2])
    detail = f"{ours:.2f} s against {raw:.2f} s; {databases:,} databases, {chunks:,} chunks; {peak:.0f} MB of memory"
    report.ratio("open_vs_raw_scan", ours / raw, 0.2, "lower", detail)
    report.figure("open_rss_mb", peak)
    report.figure("open_raw_rss_mb", max(figure["rss_mb"] for figure in measured[1::2]))


def _fill(manifest: ManifestStore, name: str, chunks: int) -> None:
    db_id = manifest.register_db(name, quire.DbKind.PAGES)
    generation = manifest.reserve_generation(db_id)
    mutations = [FullChunk(slot=slot, record=chunk_op(slot).record) for slot in range(chunks)]
    with manifest.read() as txn:
        ops = checkpoint_ops(txn, db_id, generation, mutations, 0)
    manifest.submit(ops).result()


def open_and_check(path: str) -> None:
    """Open as an owner: migrate, check the rules, load what is kept in memory, start the writer."""
    with ManifestStore.open(path):
        pass


def scan_and_decode(path: str) -> None:
    """Read and decode every row of every table."""
    env = lmdb.open(path, subdir=False, readonly=True, map_size=1 << 38, max_dbs=96)
    for table in t.TABLES.values():
        decode = (
            msgspec.msgpack.Decoder(table.codec.record_type).decode
            if table.codec.packed is None
            else struct.Struct(table.codec.packed.format[0] + table.codec.packed.format[2:]).unpack
        )
        handle = env.open_db(table.name.encode(), create=False)
        with env.begin() as txn:
            for _, raw in txn.cursor(db=handle).iternext():
                decode(raw[2:-4])
    env.close()


PARTS = (pipelined_writes, awaited_commits, concurrent_commits, reads, opening)


def _anonymous_mb() -> float:
    """Return the process's anonymous memory; mapped pages of the manifest's file belong to the page cache."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssAnon")) / 1024


if __name__ == "__main__":
    work = {function.__name__: function for function in (open_and_check, scan_and_decode)}[sys.argv[1]]
    with open(sys.argv[2], "rb") as file:  # so that the file is in the page cache for both
        while file.read(1 << 20):
            pass
    peaks, done = [_anonymous_mb()], threading.Event()

    def watch() -> None:
        while not done.wait(0.01):
            peaks.append(_anonymous_mb())

    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.perf_counter()
    work(sys.argv[2])
    took = time.perf_counter() - began
    done.set()
    watcher.join()
    sys.stdout.write(json.dumps({"seconds": took, "rss_mb": max(peaks)}))
