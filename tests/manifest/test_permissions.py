"""Missing permissions to open a manifest: the error names the file, the missing permission, and what to do.

Permissions do not apply to root, as which tests may run, so the manifest is opened as another user.
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
import quire.manifest.holders, quire.manifest.ownership  # modules that owners load at open, which this user may not read
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
def shared_directory() -> Iterator[Path]:
    """A directory that another user can reach (pytest's own cannot be reached) with a manifest that everyone may
    write."""
    directory = Path(tempfile.mkdtemp())
    directory.chmod(0o777)
    with ManifestStore.open(str(directory / "manifest.lmdb")) as manifest:
        manifest.submit([register(1)]).result()
    for file in directory.iterdir():
        file.chmod(0o666)
    yield directory
    directory.chmod(0o700)
    shutil.rmtree(directory)


def open_as_nobody(directory: Path, mode: str) -> tuple[str, ...]:
    out = finish(python(AS_NOBODY, str(directory / "manifest.lmdb"), mode, str(NOBODY)))
    return tuple(part.strip() for part in out.split("|"))


def test_a_user_with_all_permissions_can_read_and_write(shared_directory: Path) -> None:
    assert open_as_nobody(shared_directory, "r") == ("opened 1",)
    assert open_as_nobody(shared_directory, "rw") == ("opened 1",)


def test_a_reader_is_told_that_it_needs_the_lock_file(shared_directory: Path) -> None:
    """Hazard: the error for a process that only wanted to read was "the manifest cannot be opened for writing"."""
    (shared_directory / "manifest.lmdb").chmod(0o444)
    (shared_directory / "manifest.lmdb-lock").chmod(0o444)
    kind, what, hint, path = open_as_nobody(shared_directory, "r")
    assert (kind, path) == ("NotWritable", str(shared_directory / "manifest.lmdb-lock"))
    assert "lock file" in what
    assert "chmod +rw" in hint
    assert "readers" in hint
    (shared_directory / "manifest.lmdb-lock").chmod(0o666)
    assert open_as_nobody(shared_directory, "r") == ("opened 1",), "following the hint helps"


def test_a_lock_file_that_is_missing_and_cannot_be_created(shared_directory: Path) -> None:
    (shared_directory / "manifest.lmdb-lock").unlink()
    shared_directory.chmod(0o555)
    kind, what, hint, path = open_as_nobody(shared_directory, "r")
    assert (kind, path) == ("NotWritable", str(shared_directory / "manifest.lmdb-lock"))
    assert "missing" in what
    assert "owner" in hint


def test_a_manifest_without_write_permission(shared_directory: Path) -> None:
    (shared_directory / "manifest.lmdb").chmod(0o444)
    kind, what, hint, path = open_as_nobody(shared_directory, "rw")
    assert (kind, path) == ("NotWritable", str(shared_directory / "manifest.lmdb"))
    assert what == "this user may not write the manifest"
    assert 'mode="r"' in hint
    assert open_as_nobody(shared_directory, "r") == ("opened 1",), "following the hint helps"


def test_a_manifest_without_read_permission(shared_directory: Path) -> None:
    (shared_directory / "manifest.lmdb").chmod(0)
    kind, what, _, path = open_as_nobody(shared_directory, "r")
    assert (kind, path) == ("StorageFault", str(shared_directory / "manifest.lmdb"))
    assert what == "this user may not read the manifest"


@pytest.mark.parametrize("mode", ["r", "rw"])
def test_a_directory_that_cannot_be_entered_is_not_reported_as_one_without_a_manifest(
    shared_directory: Path, mode: str
) -> None:
    """Hazard: "no manifest found; `quire init` creates a store"."""
    shared_directory.chmod(0)
    kind, what, _, path = open_as_nobody(shared_directory, mode)
    assert (kind, path) == ("StorageFault", str(shared_directory))
    assert "may not access" in what


def test_a_directory_in_which_nothing_can_be_created(shared_directory: Path) -> None:
    for file in shared_directory.iterdir():
        file.unlink()
    shared_directory.chmod(0o555)
    kind, what, _, path = open_as_nobody(shared_directory, "rw")
    assert (kind, path) == ("NotWritable", str(shared_directory))
    assert what == "this user may not create a manifest in the directory"
