"""The manifest of a Parquet mirror: its documentation page, its round trip, the detection of damage, how long it keeps files
that were replaced, and whose table it is."""

from __future__ import annotations

import os
import re
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import quire
from quire.core.errors import Corruption, FormatTooNew, QuireError
from quire.durable.failpoints import armed
from quire.jobs.mirror.parquet_target import (
    FORMAT,
    NEWEST,
    ManifestFile,
    RemovedFile,
    TableManifest,
    decode,
    encode,
    encode_digest,
)
from quire.jobs.mirror.run import TYPES
from quire.testing.clock import ManualClock
from tests.jobs.mirrored_store import FORMATS, MirroredStore, fill, quiet_settings
from tests.rules.tree import ROOT

PAGE = (ROOT / "docs" / "formats" / "mirror-manifest.md").read_text("utf-8")
TEXT = st.text(max_size=20)
NUMBER = st.integers(0, 2**63 - 1)

MANIFESTS = st.builds(
    TableManifest,
    format=st.just(FORMAT),
    version=NUMBER,
    app_id=TEXT,
    batch_id=NUMBER,
    committed_at_ms=NUMBER,
    columns=st.lists(st.tuples(TEXT, st.sampled_from(sorted(TYPES))), max_size=3),
    files=st.lists(st.builds(ManifestFile, TEXT, NUMBER, NUMBER), max_size=3),
    removed=st.lists(st.builds(RemovedFile, TEXT, NUMBER), max_size=3),
)


@given(MANIFESTS)
def test_what_is_encoded_is_decoded(manifest: TableManifest) -> None:
    decoded = decode(encode(manifest), "name")
    assert encode(decoded) == encode(manifest)
    assert (decoded.version, decoded.columns, decoded.files) == (manifest.version, manifest.columns, manifest.files)


def test_the_page_has_the_fields_and_a_real_example() -> None:
    assert list(TableManifest.__struct_fields__) == re.findall(
        r"^\| `(\w+)` \| (?:number|text|list)", PAGE, re.MULTILINE
    )
    (example,) = re.findall(r'^(\{"format".*\})$', PAGE, re.MULTILINE)
    assert encode(decode(example.encode(), "example")).decode() == example


def test_every_truncation_and_every_flipped_bit_is_detected() -> None:
    files = [ManifestFile("data/a.parquet", 7, 3)]
    manifest = TableManifest(
        format=1, version=2, app_id="app", batch_id=1, committed_at_ms=5, columns=[("id", "bigint")], files=files
    )
    data = encode(manifest)
    for end in range(len(data)):
        with pytest.raises(Corruption):
            decode(data[:end], "cut")
    for offset in range(len(data)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[offset] ^= 1 << bit
            with pytest.raises(QuireError):
                decode(bytes(damaged), "flipped")


def test_newer_fields_are_ignored_and_newer_formats_refused() -> None:
    data = b'{"format":%d,"version":1,"app_id":"a","batch_id":0,"committed_at_ms":0,"columns":[],"files":[],"x":1,"digest":""}'
    assert decode(encode_digest(data % FORMAT), "more").version == 1
    with pytest.raises(FormatTooNew):
        decode(encode_digest(data % (FORMAT + 1)), "newer")
    with pytest.raises(Corruption):
        decode(encode_digest(b'{"digest":""}'), "empty")


@pytest.mark.parametrize("kind", ["parquet", "delta"])
def test_replaced_files_are_kept_from_the_commit_on_however_long_the_run_took(tmp_path: Path, kind: str) -> None:
    """Hazard: the removal of a file was dated at the start of its run. After a run as long as `keep_seconds`, the next one
    deleted files that queries had begun to read moments before."""
    mirror, clock = MirroredStore(tmp_path, kind), ManualClock()
    if kind == "parquet":
        mirror.options = {"keep_seconds": "3600"}
    with quire.open(tmp_path / "store", settings=quiet_settings(), clock=clock) as store:
        fill(store, "tenant-1")
        mirror.define(store)
        mirror.run(store)
        with closing(store.sqlite("tenant-1")) as connection:
            connection.execute("DELETE FROM orders WHERE id = 1")
        with armed("jobs.mirror.written", lambda _: clock.advance(7_200)):
            mirror.run(store)
        removed_at = clock.now_ms()
        if kind == "delta":
            log = "".join(path.read_text() for path in (tmp_path / "lake" / "_delta_log").glob("*.json"))
            assert re.findall(r'"deletionTimestamp":(\d+)', log) == [str(removed_at)]
            return
        data = tmp_path / "lake" / "data"
        for path in data.iterdir():
            os.utime(path, (1, 1))
        for seconds, kept in ((60, 3), (3_600, 3)):
            clock.advance(seconds)
            fill(store, f"tenant-after-{seconds}")
            mirror.run(store)
            assert len(list(data.iterdir())) == kept, "the replaced file is deleted an hour after the commit"


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("had_rows", [False, True])
def test_an_empty_table_that_another_mirror_has_left_is_taken_over(tmp_path: Path, kind: str, had_rows: bool) -> None:
    """Hazard: in a Parquet target the versions still named the mirror that had created the table. The new mirror was refused
    from its second run on, or at once if the other one had reached a higher batch."""
    mirror = MirroredStore(tmp_path, kind)
    with mirror.open() as store:
        mirror.define(store)
        if had_rows:
            fill(store, "tenant-1")
            mirror.run(store)
            store.drop("tenant-1")
        mirror.run(store)
        store.mirrors.drop("lake")
        mirror.define(store)
        fill(store, "tenant-2")
        mirror.run(store)
        fill(store, "tenant-3")
        assert not mirror.run(store).full


def test_the_run_after_a_kill_replaces_an_old_copy_of_the_manifest(tmp_path: Path) -> None:
    """Hazard: a run that had nothing to commit left `manifest.json` behind the table, and reported that it was up to date."""
    mirror = MirroredStore(tmp_path, "parquet")
    with mirror.open() as store:
        fill(store, "tenant-1")
        mirror.define(store)
        mirror.run(store)
        fill(store, "tenant-2")
        assert mirror.killed_run(store, "jobs.mirror.version_created")
        assert mirror.run(store).rows_written == 0
        (tmp_path / "lake" / NEWEST).unlink()
        mirror.run(store)
