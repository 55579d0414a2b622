"""`quire verify` reads everything: one flipped byte in any file of a store is found, and the file is named."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lmdb
import pytest

import quire
from quire.core.errors import QuireError
from quire.durable.files import OsDisk
from quire.lsm.backup import back_up
from quire.lsm.sst_reader import SSTable
from quire.manifest import tables as t
from quire.manifest.records import RetentionRecord
from quire.store.store import Store
from quire.stream.mlog_format import CHUNK_BYTES, COPY_BYTES

WITHOUT_CHECKSUM: dict[str, str] = {
    r"store\.lock": "empty: only its lock counts",
    r"manifest\.lmdb-lock": "LMDB's table of readers: created by the first process that opens the store",
    r"manifest\.lmdb-checked": "a hint with a checksum: a damaged one is ignored, and the next open checks everything",
    r"quire\.toml": "edited by users: errors are reported when the store is opened",
    r"streams/\d+/manifest/writer\.lock": "empty: only its lock counts",
}
"""Files whose bytes have no checksum, and why."""


def significant_bytes(root: Path, relative: str) -> range:
    """The significant bytes of a file, without zeros and unwritten space."""
    size = (root / relative).stat().st_size
    if relative.endswith(".sst"):
        # The schema at the start of an Arrow file: readers use the one in the footer.
        table = SSTable.open(OsDisk(), str(root / relative))
        table.close()
        return range(table.meta.blocks[0].offset, size)
    if (root / relative).parent.match("streams/*/manifest"):
        # Header and commit copy of the active chunk: a crash may leave either torn, and the other one is used.
        newest = max((root / relative).parent.glob("*.mlog"), key=lambda path: int(path.stem))
        if newest.name == Path(relative).name:
            return range(CHUNK_BYTES, size - COPY_BYTES)
    return range(size)


PARTLY_CHECKED: dict[str, str] = {
    r"objects/kv/cart/backups/[0-9a-f]{16}\.json": "a backup's list is JSON without a checksum: names, sizes and digests in it "
    "are compared with the tables, its time is not",
}
"""Files that are read, but whose checksums do not cover every byte."""


def fill(store: Store) -> None:
    """Create an example of every kind of file."""
    connection = store.sqlite("shop", create=True)
    connection.execute("create table items (id, name)")
    with connection:
        connection.executemany("insert into items values (?, ?)", [(n, "x" * 200) for n in range(200)])
    store.snapshot("shop", "monday")
    store.checkpoint("shop", runner="threads")
    connection.executemany("insert into items values (?, ?)", [(n, "y" * 200) for n in range(20)])
    store.snapshot("shop", "tuesday")
    for number in range(20):
        connection.execute("insert into items values (?, ?)", (number, "z" * 200))
    connection.close()
    stream = store.stream("clicks", create=True)
    for _ in range(2):
        stream.append([b"record %d" % number for number in range(500)])
        stream.seal()
    stream.compress()
    stream.upload()
    for number in range(20):
        stream.append(b"open %d" % number)
        stream.sync()
    cart = store.kv("cart", create=True)
    for value in (b"first", b"second"):
        cart.write({b"key %05d" % number: value * 10 for number in range(500)})
        cart.flush()
        if value == b"first":
            store.snapshot("cart", "v1")
    for number in range(20):
        cart.put(b"late %d" % number, b"value")
    back_up(cart, store.objects, "cart")
    store.manifest.retention.set("shop", RetentionRecord(keep_last=6))


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sound") / "store"
    with quire.open(root) as store:
        fill(store)
    return root


def verify_report(root: Path) -> tuple[str, dict[str, Any]]:
    """Everything that a verification reports, or why the store cannot be opened; and its result."""
    try:
        with quire.open(root) as store:
            job = store.heavy.verify(runner="threads")
            assert job.result is not None, job.record.error
            result = job.result
            damaged = [f"{artifact['artifact']} {artifact['state']}" for artifact in store.heavy.damaged()]
    except QuireError as error:
        return str(error), {}
    problems = [f"{problem['path']}: {problem['what']}" for problem in result["problems"]]
    return "\n".join([*damaged, *problems, *result["logs"]]), result


def files(root: Path) -> Iterator[str]:
    for folder, _, names in os.walk(root):
        for name in names:
            relative = os.path.relpath(os.path.join(folder, name), root)
            if not any(re.fullmatch(pattern, relative) for pattern in (*WITHOUT_CHECKSUM, *PARTLY_CHECKED)):
                yield relative


def names_of(relative: str) -> list[str]:
    """The names that a verification may use for a file: its path, or the artifact of which it is a copy."""
    names = [relative]
    relative = re.sub(r"^objects/[0-9a-f-]{36}/e/[0-9a-f]{8}/", "objects/", relative)
    if match := re.fullmatch(r"objects/(.*)", relative):
        names.append(match[1])
    if match := re.fullmatch(r"pages/([0-9a-f]{8})/wal/([0-9a-f]{8})\.seg", relative):
        names.append(f"{match[1]}/{match[2]}/wal:00000000")
    if match := re.fullmatch(r"streams/(\d+)/(?:hot|warm)/([0-9a-f]{16})\.seg", relative):
        names.append(f"{int(match[1]):08x}/{int(match[2], 16):08x}/wal:00000000")
    if match := re.fullmatch(r"(?:streams|objects/manifest)/(\d+)/(?:(?:manifest/)?\d+\.mlog|stream\.json)", relative):
        names.append(f"manifest log of stream {match[1]}")
    return names


def test_an_intact_store_is_verified_completely(intact: Path, tmp_path: Path) -> None:
    root = tmp_path / "store"
    shutil.copytree(intact, root)
    text, result = verify_report(root)
    assert text == ""
    assert result["complete"]
    for kind in (
        "chunk", "page-WAL segment", "stream segment", "manifest log of a stream", "key-value table",
        "key-value manifest or log", "key-value backup", "manifest",
    ):  # fmt: skip
        assert result["kinds"][kind]["files"] > 0, kind
        assert result["kinds"][kind]["problems"] == 0


def test_one_flipped_byte_of_any_file_is_found_and_the_file_is_named(intact: Path, tmp_path: Path) -> None:
    """Three bytes of each file: the first, one of its header, and one in the middle of its written part."""
    missed = []
    for relative in sorted(set(files(intact)) - {"manifest.lmdb"}):
        body = (intact / relative).read_bytes()
        written = [offset for offset in significant_bytes(intact, relative) if body[offset]]
        for offset in {written[0], written[min(9, len(written) - 1)], written[len(written) // 2]} if written else ():
            root = tmp_path / "store"
            shutil.copytree(intact, root)
            wrong = bytearray(body)
            wrong[offset] ^= 4
            (root / relative).write_bytes(wrong)
            text, _ = verify_report(root)
            if not any(name in text for name in names_of(relative)):
                missed.append(f"{relative} at {offset} of {len(body)}: {text[:200]!r}")
            shutil.rmtree(root)
    assert not missed, "\n".join(missed)


@pytest.mark.parametrize("table", [t.RETENTION, t.CHUNK_CATALOG])
def test_a_flipped_byte_of_a_row_of_the_manifest_is_found_and_the_row_is_named(
    intact: Path, tmp_path: Path, table: t.Table[Any]
) -> None:
    root = tmp_path / "store"
    shutil.copytree(intact, root)
    path = root / "manifest.lmdb"
    with lmdb.open(str(path), subdir=False, max_dbs=96, map_size=1 << 30) as env:
        handle = env.open_db(table.name.encode(), create=False)
        with env.begin(db=handle) as txn:
            key, raw = next(iter(txn.cursor()))
        env.copy(str(tmp_path / "compact"), compact=True)  # free space holds old copies of rows
    body = bytearray((tmp_path / "compact").read_bytes())
    at = body.find(bytes(key) + bytes(raw))
    assert at >= 0
    body[at + len(key) + 3] ^= 1
    path.write_bytes(body)
    text, _ = verify_report(root)
    assert f"a row of {table.name}" in text


def test_a_missing_file_is_found(intact: Path, tmp_path: Path) -> None:
    for relative in sorted(set(files(intact))):
        if not re.fullmatch(r"(lsm/.*\.sst|lsm/.*/MANIFEST-\d+|pages/.*\.seg|objects/.*/base:.*)", relative):
            continue
        if not (intact / relative).read_bytes().rstrip(b"\0"):
            continue
        root = tmp_path / "store"
        shutil.copytree(intact, root)
        (root / relative).unlink()
        text, _ = verify_report(root)
        assert any(name in text for name in (*names_of(relative), str(Path(relative).parent))), (relative, text)
        shutil.rmtree(root)
