"""`quire archive`, `quire restore-store` and `quire takeover --discard`: their output, and their effect."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import quire
from quire.cli.candidates import WORDS
from quire.store.config_edit import with_setting
from tests.cli.conftest import Run
from tests.manifest.helpers import eventually
from tests.programs import Program, run_program
from tests.rules.tree import SRC

TOML = """\
# ours
object_store = "{bucket}"   # on another disk

[archive]
# mode = "off"  # the mode
interval_seconds = 0.05
"""


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    return tmp_path / "bucket"


@pytest.fixture
def shop(tmp_path: Path, bucket: Path) -> Path:
    """A store with its own bucket, without archiving."""
    root = tmp_path / "shop"
    root.mkdir()
    (root / "quire.toml").write_text(TOML.format(bucket=bucket))
    with quire.open(root) as store:
        store.sqlite("orders", create=True).execute("create table t(a)")
        store.kv("cart", create=True).put(b"alice", b"3 apples")
        store.stream("clicks", create=True).append([b"one", b"two"]).result()
    return root


def test_on_edits_the_configuration_and_uploads_everything(run: Run, shop: Path, bucket: Path) -> None:
    result = run("archive", "on", at=shop)
    assert result.code == 0, result.err
    assert "archive.mode is now async; the whole store is in" in result.out
    text = (shop / "quire.toml").read_text()
    assert text == TOML.format(bucket=bucket).replace('# mode = "off"  # the mode', 'mode = "async"  # the mode')
    status = run("archive", "status", "--json", at=shop).data
    assert (status["mode"], status["state"], status["safe"]) == ("async", "closed", True)
    assert status["bucket_oldest_at_ms"] <= status["bucket_newest_at_ms"] > 0
    shutil.rmtree(shop)
    restored = run("restore-store", str(bucket), str(shop), "--takeover", at=None)
    assert restored.code == 0
    assert ": 1 page database, 1 stream, 1 key-value set\n" in restored.out
    assert "; each takeover begins a new range of numbers\n" in run("info", at=shop).out
    assert run("kv", "get", "cart", "alice", at=shop).out == "3 apples\n"


def test_on_for_a_store_that_is_archived_already_uploads_nothing(run: Run, shop: Path) -> None:
    run("archive", "on", at=shop)
    again = run("archive", "on", at=shop)
    assert again.out.endswith("/bucket: nothing had to be uploaded\n")


def test_on_refuses_objects_inside_the_store(run: Run, path: Path) -> None:
    before = (path / "quire.toml").read_bytes()
    result = run("archive", "on")
    assert result.code == 2
    assert "the object store is inside the store's directory" in result.err
    assert "set object_store to it" in result.err.replace("\n       ", " ")
    assert (path / "quire.toml").read_bytes() == before


def test_on_refuses_an_unknown_mode(run: Run, shop: Path) -> None:
    result = run("archive", "on", "--mode", "later", at=shop)
    assert (result.code, "use async or sync" in result.err) == (2, True)


@contextmanager
def owned(shop: Path, *, serving: bool) -> Iterator[None]:
    """The store is owned by another process, which is killed at the end of the block."""
    if serving:
        command = ["-m", "quire", "serve", "--store", str(shop)]
    else:
        program = f"import quire, time; s = quire.open({str(shop)!r}); print('open', flush=True); time.sleep(600)"
        command = ["-c", program]
    env = {**os.environ, "PYTHONPATH": str(SRC)}
    with Program(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as owner:
        try:
            assert owner.stdout is not None
            assert owner.stdout.readline()
            yield
        finally:
            owner.kill()


def test_a_running_owner_must_be_restarted(run: Run, shop: Path) -> None:
    with owned(shop, serving=False):
        result = run("archive", "on", "--mode", "sync", "--json", at=shop)
        assert result.data["restart_owner"] is True
        assert run("archive", "status", "--json", at=shop).data["state"] == "owned"
    result = run("archive", "off", "--json", at=shop)
    assert result.data == {"mode": "off", "was": "sync", "restart_owner": False}
    assert run("archive", "status", "--json", at=shop).data == {"mode": "off"}


def test_status_of_a_killed_store(run: Run, shop: Path) -> None:
    run("archive", "on", at=shop)
    program = f"import os, quire; s = quire.open({str(shop)!r}); s.kv('cart').put(b'x', b'y'); os.kill(os.getpid(), 9)"
    run_program(["-c", program], env={**os.environ, "PYTHONPATH": str(SRC)}, timeout=60)
    status = run("archive", "status", "--json", at=shop).data
    assert (status["state"], status["safe"]) == ("not closed cleanly", False)
    doctor = {row["check"]: row for row in run("doctor", "--json", at=shop).data}
    assert doctor["archive"]["state"] == "warn"


def test_drill_without_an_owner_and_without_an_archive(run: Run, shop: Path) -> None:
    result = run("archive", "drill", at=shop)
    assert (result.code, "run `quire archive on`" in result.err) == (4, True)
    run("archive", "on", at=shop)
    result = run("archive", "drill", "--json", at=shop)
    assert (result.code, result.data["passed"], result.data["databases"]) == (0, True, 3)
    status = run("archive", "status", at=shop)
    assert "passed, restored in" in status.out
    assert list((shop / "scratch").iterdir()) == []


def test_status_and_drill_ask_the_owner_that_serves(run: Run, shop: Path) -> None:
    run("archive", "on", at=shop)
    with owned(shop, serving=True):
        assert run("kv", "put", "cart", "bob", "a pear", at=shop).code == 0
        assert eventually(lambda: run("archive", "status", "--json", at=shop).data["state"] == "archived", 60)
        status = run("archive", "status", "--json", at=shop).data
        assert status["puts"] > 0
        result = run("archive", "drill", "--json", at=shop)
        assert (result.code, result.data["passed"]) == (0, True), result


def test_restore_into_the_past_claims_nothing_and_takes_over_only_with_discard(
    run: Run, shop: Path, bucket: Path, tmp_path: Path
) -> None:
    run("archive", "on", at=shop)
    time.sleep(0.02)
    before_change = time.time()
    time.sleep(0.02)
    run("kv", "put", "cart", "alice", "gone", at=shop)
    at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(before_change)) + f"{before_change % 1:.3f}"[1:]
    old = tmp_path / "old"
    result = run("restore-store", str(bucket), str(old), "--at", at, "--json", at=None)
    assert result.code == 0, result.err
    assert "quire takeover --discard" in result.data["next"]
    assert run("kv", "put", "cart", "carol", "x", at=old).code != 0, "nothing is claimed yet"
    assert run("kv", "put", "cart", "dave", "x", at=shop).code == 0, "the owner continues"
    refused = run("takeover", "--yes", at=old)
    assert (refused.code, "--discard" in refused.err) == (4, True)
    assert "archive.incomplete" not in refused.err, "no store was opened"
    assert run("takeover", "--discard", "--yes", at=old).code == 0
    assert run("kv", "get", "cart", "alice", at=old).out == "3 apples\n"
    fenced = run("kv", "put", "cart", "erin", "x", at=shop)
    status = run("archive", "status", "--json", at=shop)
    assert fenced.code != 0 or status.data["fenced"]


def test_errors_of_a_restore_are_explained(run: Run, shop: Path, bucket: Path, tmp_path: Path) -> None:
    run("archive", "on", at=shop)
    assert "is not empty" in run("restore-store", str(bucket), str(shop), at=None).err
    assert (
        "does not reach back"
        in run("restore-store", str(bucket), str(tmp_path / "a"), "--at", "2001-01-01", at=None).err
    )
    assert (
        "this bucket contains no store"
        in run("restore-store", str(tmp_path / "empty"), str(tmp_path / "b"), at=None).err
    )
    assert (
        "plain HTTP"
        in run("restore-store", "s3://b/p", str(tmp_path / "c"), "--endpoint", "http://127.0.0.1:9", at=None).err
    )


def test_info_shows_the_archive(run: Run, shop: Path) -> None:
    assert "archive       off" in run("info", at=shop).out
    run("archive", "on", at=shop)
    closed = run("info", at=shop)
    assert "archive       async; closed after its last upload; window 24 h\nlast drill    never" in closed.out
    assert run("info", "--json", at=shop).data["archive_dollars_per_month"] is None
    with owned(shop, serving=False):
        assert "the owner does not serve, so its lag is unknown" in run("info", at=shop).out
    with owned(shop, serving=True):
        assert eventually(lambda: "archive       async; archived; lag 0.0 s; window" in run("info", at=shop).out, 60)
        assert "cost          about US$ " in run("info", at=shop).out
        assert run("info", "--json", at=shop).data["archive_dollars_per_month"] > 0


def test_modes_are_completed() -> None:
    assert WORDS["async|sync"] == ("async", "sync")


@pytest.mark.parametrize("text", ['archive.mode = "off"\n', 'archive = { mode = "off" }\n'])
def test_a_configuration_that_cannot_be_edited_is_refused(text: str) -> None:
    with pytest.raises(quire.InvalidConfig, match="cannot be edited automatically"):
        with_setting(text, "archive", "mode", "async")


def test_values_are_quoted_and_comments_kept() -> None:
    text = with_setting('object_store = "a#b" # here\n\n[objects]\n', "", "object_store", 'c"d\\e')
    assert text == 'object_store = "c\\"d\\\\e" # here\n\n[objects]\n'
    assert with_setting("[objects]\n", "objects", "allow_http", True) == "[objects]\nallow_http = true\n"


def test_a_write_in_a_deposed_directory_fails_and_reads_still_work(
    run: Run, shop: Path, bucket: Path, tmp_path: Path
) -> None:
    """The command made its change, was fenced at its last upload, and exited with 0."""
    assert run("archive", "on", at=shop).code == 0
    new = tmp_path / "new"
    assert run("restore-store", str(bucket), str(new), "--takeover").code == 0
    assert run("kv", "get", "cart", "alice", at=shop).out.strip() == "3 apples"
    put = run("kv", "put", "cart", "alice", "4 apples", at=shop)
    assert put.code != 0
    assert "another owner has claimed" in put.err
    assert "next:" in put.err
    assert run("kv", "get", "cart", "alice", at=shop).code == 0
    assert run("kv", "get", "cart", "alice", at=new).out.strip() == "3 apples"


def test_an_abandoned_epoch_is_listed_and_removed_by_name(run: Run, shop: Path, bucket: Path, tmp_path: Path) -> None:
    assert run("archive", "on", at=shop).code == 0
    assert run("archive", "abandoned", at=shop).out.strip() == "no abandoned owner epochs"
    former = tmp_path / "then"
    assert run("restore-store", str(bucket), str(former)).code == 0
    shutil.rmtree(shop)
    assert run("restore-store", str(bucket), str(shop), "--takeover").code == 0
    with quire.open(shop) as store:
        store.kv("cart").put(b"bob", b"a mistake")
    assert run("takeover", "--discard", "--yes", at=former).code == 0
    with quire.open(former) as store:
        store.kv("cart").put(b"alice", b"4 apples")
    (row,) = run("archive", "abandoned", "--json", at=former).data
    assert row["owner_epoch"] == 2
    refused = run("archive", "abandoned", "--remove", "1", "--yes", at=former)
    assert "no such abandoned owner epoch" in refused.err
    removed = run("archive", "abandoned", "--remove", "2", "--yes", "--json", at=former)
    assert removed.data == {"removed": row["objects"]}
    assert run("archive", "abandoned", "--json", at=former).data == []
    assert run("archive", "audit", at=former).code == 0


def test_a_lost_bucket_is_reported_and_a_new_one_gets_the_whole_store(run: Run, shop: Path, bucket: Path) -> None:
    assert run("archive", "on", at=shop).code == 0
    shutil.rmtree(bucket)
    status = run("archive", "status", at=shop)
    assert "would lose nothing" not in status.out
    assert run("archive", "status", "--json", at=shop).data["safe"] is False
    bucket.mkdir()
    repeated = run("archive", "on", "--json", at=shop)
    assert repeated.data["objects"] >= 2, "a base, and the log object that refers to it"
    assert run("archive", "status", "--json", at=shop).data["safe"] is True
    assert run("archive", "audit", at=shop).code == 0


def test_an_owner_whose_bucket_was_emptied_starts_with_a_base(
    run: Run, shop: Path, bucket: Path, tmp_path: Path
) -> None:
    assert run("archive", "on", at=shop).code == 0
    shutil.rmtree(bucket)
    bucket.mkdir()
    with quire.open(shop) as store:
        store.kv("cart").put(b"bob", b"2 pears")
        assert store.archive is not None
        store.archive.wait(60)
    assert run("restore-store", str(bucket), str(tmp_path / "restored")).code == 0
    with quire.open(tmp_path / "restored", takeover=True, discard=True) as store:
        assert dict(store.kv("cart").scan()) == {b"alice": b"3 apples", b"bob": b"2 pears"}
