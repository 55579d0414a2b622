"""Too few rights to open a manifest: the error names the file, the right that is missing, and what to do.

Rights do not bind root, as whom tests may run: those who open are another user.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.manifest.store import ManifestStore
from tests.manifest.helpers import finish, python, register

NOBODY = 65534

AS_NOBODY = """
import os, sys
import quire.manifest.holders, quire.manifest.ownership  # what owners load when they open, which nobody may not
from quire.core.errors import QuireError
from quire.manifest.store import ManifestStore
path, mode, user = sys.argv[1], sys.argv[2], int(sys.argv[3])
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
try:
    with ManifestStore.open(path, mode=mode) as manifest, manifest.read() as txn:
        print("opened", txn.database_id("db1"))
except QuireError as error:
    print(type(error).__name__, "|", error.what, "|", error.hint, "|", error.where["path"])
"""


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory that another user can reach, which pytest's own are not, with a manifest that anyone may write."""
    directory = Path(tempfile.mkdtemp())
    directory.chmod(0o777)
    with ManifestStore.open(str(directory / "manifest.lmdb")) as manifest:
        manifest.submit([register(1)]).result()
    for file in directory.iterdir():
        file.chmod(0o666)
    yield directory
    directory.chmod(0o700)
    shutil.rmtree(directory)


def opened(directory: Path, mode: str) -> tuple[str, ...]:
    out = finish(python(AS_NOBODY, str(directory / "manifest.lmdb"), mode, str(NOBODY)))
    return tuple(part.strip() for part in out.split("|"))


def test_a_user_with_all_rights_may_read_and_write(shared: Path) -> None:
    assert opened(shared, "r") == ("opened 1",)
    assert opened(shared, "rw") == ("opened 1",)


def test_a_reader_hears_that_it_needs_the_lock_file(shared: Path) -> None:
    """Hazard: "the manifest cannot be opened for writing", said to somebody who only wanted to read."""
    (shared / "manifest.lmdb").chmod(0o444)
    (shared / "manifest.lmdb-lock").chmod(0o444)
    kind, what, hint, path = opened(shared, "r")
    assert (kind, path) == ("NotWritable", str(shared / "manifest.lmdb-lock"))
    assert "lock file" in what
    assert "chmod +rw" in hint
    assert "readers" in hint
    (shared / "manifest.lmdb-lock").chmod(0o666)
    assert opened(shared, "r") == ("opened 1",), "what the hint says helps"


def test_a_lock_file_that_is_missing_and_cannot_be_made(shared: Path) -> None:
    (shared / "manifest.lmdb-lock").unlink()
    shared.chmod(0o555)
    kind, what, hint, path = opened(shared, "r")
    assert (kind, path) == ("NotWritable", str(shared / "manifest.lmdb-lock"))
    assert "missing" in what
    assert "owner" in hint


def test_a_manifest_that_may_not_be_written(shared: Path) -> None:
    (shared / "manifest.lmdb").chmod(0o444)
    kind, what, hint, path = opened(shared, "rw")
    assert (kind, path) == ("NotWritable", str(shared / "manifest.lmdb"))
    assert what == "this user may not write the manifest"
    assert 'mode="r"' in hint
    assert opened(shared, "r") == ("opened 1",), "what the hint says helps"


def test_a_manifest_that_may_not_be_read(shared: Path) -> None:
    (shared / "manifest.lmdb").chmod(0)
    kind, what, _, path = opened(shared, "r")
    assert (kind, path) == ("StorageFault", str(shared / "manifest.lmdb"))
    assert what == "this user may not read the manifest"


@pytest.mark.parametrize("mode", ["r", "rw"])
def test_a_directory_that_may_not_be_entered_is_not_one_without_a_manifest(shared: Path, mode: str) -> None:
    """Hazard: "no manifest found; `quire init` creates a store"."""
    shared.chmod(0)
    kind, what, _, path = opened(shared, mode)
    assert (kind, path) == ("StorageFault", str(shared))
    assert "enter" in what


def test_a_directory_in_which_nothing_may_be_made(shared: Path) -> None:
    for file in shared.iterdir():
        file.unlink()
    shared.chmod(0o555)
    kind, what, _, path = opened(shared, "rw")
    assert (kind, path) == ("NotWritable", str(shared))
    assert what == "this user may not create a manifest in the directory"
