"""Two components of the key-value engine: merging tables against pyarrow, and replaying the manifest against a bare loop.

Run as part of `python -m bench kv`. The bare loop unpacks, checks and stores each event in a dictionary.
"""

from __future__ import annotations

import os
import shutil
import struct
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from awscrt.checksums import crc64nvme

from bench.kv import LARGE, pairs, per_second
from bench.report import Report, alternate, rate, seconds
from quire.durable.files import OsDisk
from quire.durable.log_format import HEAD, HEADER_BYTES, LINK
from quire.durable.log_writer import LogWriter
from quire.durable.names import LsmHome, sst_entry_path
from quire.lsm.bloom import hash_key
from quire.lsm.compaction import VersionRetention
from quire.lsm.manifest import Manifest
from quire.lsm.manifest_data import AddSst, AllocateSstId, ManifestSstEntry, RemoveSst, UpdateLsn
from quire.lsm.manifest_format import LOG_FIRST, encode_event
from quire.lsm.merge import SORT_KEYS, merge_tables
from quire.lsm.sst_format import SCHEMA
from quire.lsm.sst_reader import SSTable
from quire.lsm.sst_writer import TableWriter
from quire.lsm.table_options import table_options

ABSENT = 10_000
"""Keys that are not in a table, for the rate of false positives of its filter."""


def compaction(report: Report, directory: Path, quick: bool) -> None:
    """Merge four overlapping tables into one level. pyarrow concatenates, sorts by key and lsn, and writes the same batches."""
    count, runs = (50_000, 4) if quick else (250_000, 4)
    folder = directory / "compaction"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    disk, options, keep = OsDisk(), table_options(LARGE), VersionRetention()
    keys, value = pairs(count * runs)
    inputs, batches = [], []
    for number in range(runs):
        mine = sorted(keys[number * count : (number + 1) * count])
        lsns = pa.array(range(number * count, (number + 1) * count), pa.uint64())
        columns = [pa.array(mine, pa.binary()), pa.array([value] * count, pa.binary()), lsns, pa.array([False] * count)]
        batches.append(pa.record_batch(columns, schema=SCHEMA))
        writer = TableWriter(number + 1, 0, options)
        writer.add(batches[-1])
        writer.write(disk, str(folder / f"in{number}.sst"))
        inputs.append(SSTable.open(disk, str(folder / f"in{number}.sst")))
    absent = [key + b"!" for key in keys[:ABSENT]]
    report.figure("bloom_false_positives", sum(inputs[0].bloom.may_contain(hash_key(key)) for key in absent) / ABSENT)
    numbers = iter(range(100, 1_000_000))

    def ours() -> None:
        def new_table() -> tuple[int, str]:
            number = next(numbers)
            return number, str(folder / f"{number}.sst")

        outputs = merge_tables(
            disk, inputs, keep, level=1, table_bytes=LARGE.table_bytes, options=options, new_table=new_table
        )
        assert sum(meta.rows for _, meta in outputs) == count * runs

    def arrow(threads: bool) -> None:
        read = [pa.ipc.open_file(str(folder / f"in{number}.sst")).read_all() for number in range(runs)]
        whole = pa.concat_tables(read).combine_chunks()
        whole = whole.take(pc.sort_indices(whole, sort_keys=SORT_KEYS))
        rows = len(whole) * LARGE.block_bytes // max(1, whole.nbytes)
        with pa.ipc.new_file(
            str(folder / "arrow.ipc"),
            SCHEMA,
            options=pa.ipc.IpcWriteOptions(compression="lz4", use_threads=threads),
        ) as writer:
            for batch in whole.to_batches(max_chunksize=rows):
                writer.write_batch(batch)
        fd = os.open(folder / "arrow.ipc", os.O_RDONLY)
        os.fdatasync(fd)
        os.close(fd)

    rows = count * runs
    ours_rate, threaded, single = alternate(
        3 if quick else 5,
        lambda: per_second(rows, ours),
        lambda: per_second(rows, lambda: arrow(True)),
        lambda: per_second(rows, lambda: arrow(False)),
    )
    figures = [ours_rate, max(threaded, single)]  # with or without threads, whichever is faster
    report.figure("compaction_rows", figures[0])
    report.figure("pyarrow_rows_threads", threaded)
    report.figure("pyarrow_rows_one_thread", single)
    report.ratio(
        "compaction_vs_pyarrow",
        figures[0] / figures[1],
        0.5,
        "higher",
        f"{rate(figures[0])} rows against {rate(figures[1])}",
    )
    for table in inputs:
        table.close()
    shutil.rmtree(folder)


# ── manifest ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def manifest(report: Report, directory: Path, quick: bool) -> None:
    """Open a manifest with a long log, against a bare loop over the same bytes; then after a checkpoint, against a new one."""
    count = 20_000 if quick else 100_000
    home = LsmHome(str(directory / "manifest"))
    shutil.rmtree(home.path, ignore_errors=True)
    Path(home.path, "manifest").mkdir(parents=True)
    with LogWriter.create(OsDisk(), home.manifest_log, kind=LOG_FIRST) as log:
        for start in range(1, count // 4 + 1, 250):
            log.append_many(record for number in range(start, start + 250) for record in events(number))

    def ours() -> None:
        opened = Manifest.open(OsDisk(), home)
        assert opened.state().next_sst_id == count // 4 + 1
        opened.abandon()

    def bare() -> None:
        bare_replay(Path(home.manifest_log).read_bytes())

    figures = alternate(3 if quick else 7, lambda: per_second(count, ours), lambda: per_second(count, bare))
    report.figure("manifest_replay", figures[0])
    report.ratio(
        "manifest_replay_vs_bare_loop",
        figures[0] / figures[1],
        0.6,
        "higher",
        f"{rate(figures[0])} events against {rate(figures[1])}",
    )
    with Manifest.open(OsDisk(), home) as opened:
        for number in list(opened.state().tables):
            opened.remove_sst(number)
        opened.checkpoint()
    new = LsmHome(str(directory / "manifest-new"))
    with Manifest.open(OsDisk(), new) as opened:
        opened.checkpoint()

    def opening(where: LsmHome) -> float:
        return seconds(lambda: Manifest.open(OsDisk(), where).abandon())

    openings = alternate(15, lambda: opening(home), lambda: opening(new))
    report.ratio(
        "start_after_checkpoint_vs_new",
        openings[0] / openings[1],
        1.5,
        "lower",
        f"{openings[0] * 1e3:.2f} ms with {count:,} events of history, {openings[1] * 1e3:.2f} ms without",
    )


def events(number: int) -> list[bytes]:
    """Return events like those that a flush and a compaction log."""
    entry = ManifestSstEntry(number, sst_entry_path(number))
    logged = (AllocateSstId(number), AddSst(entry), UpdateLsn(number * 100), RemoveSst(max(0, number - 40)))
    return [encode_event(event) for event in logged]


def bare_replay(data: bytes) -> None:
    """Do what every replay has to do: unpack each event, verify its checksum, update a dictionary."""
    newest: dict[int, int] = {}
    crc, head, tail, one = crc64nvme, HEAD.unpack_from, LINK.unpack_from, struct.Struct("<BQ").unpack_from
    view, at, last = memoryview(data), HEADER_BYTES, len(data) - 24
    (link,) = tail(data, HEADER_BYTES - 8)
    while at <= last:
        length, _, _ = head(data, at)
        end = at + 16 + length
        (stored,) = tail(data, end)
        if crc(view[at:end], link) != stored:
            raise AssertionError("the log is damaged")
        link = stored
        if length:
            tag, number = one(data, at + 16)
            newest[tag] = number
        at = end + 8


PARTS = (compaction, manifest)
