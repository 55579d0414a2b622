"""Where an owner listens: file modes, long paths, stale sockets, discovery (K8)."""

from __future__ import annotations

import os
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import quire
from quire.durable.files import OsDisk
from quire.durable.names import SOCKET, SOCKET_POINTER
from quire.service.local_owner import find_owner
from quire.service.sockets import SocketPath, binding, hang_up, is_alive, place_of, where_owner_listens
from tests.service.conftest import Start
from tests.service.owners import served


@pytest.fixture
def short_directory() -> Iterator[Path]:
    """A directory with a short path: pytest's directories get longer with the number of the run, and a socket's path is
    limited."""
    with tempfile.TemporaryDirectory(prefix="q") as name:
        yield Path(name)


@pytest.fixture
def long_path(tmp_path: Path, short_directory: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store whose path is too long for a socket."""
    runtime = short_directory / "run"
    runtime.mkdir(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    return tmp_path / ("d" * 60) / ("e" * 60)


def test_the_socket_is_accessible_to_its_owner_only(path: Path) -> None:
    with served(path) as (store, server):
        assert server.address == f"grpc+unix://{path}/quire.sock"
        status = os.stat(path / SOCKET)
        assert stat.S_ISSOCK(status.st_mode)
        assert stat.S_IMODE(status.st_mode) == 0o600
        assert where_owner_listens(OsDisk(), store.path) == str(path / SOCKET)
        with pytest.raises(quire.InvalidInput, match="already has a server"):
            store.serve()
        with quire.connect(path) as client:
            assert client.databases() == []
    assert sorted(os.listdir(path)) == ["manifest.lmdb", "manifest.lmdb-lock", "quire.toml", "store.lock"]


def test_a_long_path_gets_a_pointer(long_path: Path) -> None:
    long_path.parent.mkdir()
    with served(long_path) as (_, server):
        address = (long_path / SOCKET_POINTER).read_text()
        assert server.address == f"grpc+unix://{address}"
        assert address.startswith(os.environ["XDG_RUNTIME_DIR"])
        assert stat.S_IMODE(os.stat(os.path.dirname(address)).st_mode) == 0o700
        assert stat.S_IMODE(os.stat(address).st_mode) == 0o600
        with quire.connect(long_path) as client:
            client.create("shop", "pages")
        owner = find_owner(long_path)
        assert owner is not None
        owner.close()
    assert not os.path.exists(address)
    assert not (long_path / SOCKET_POINTER).exists()


@pytest.mark.parametrize("name", ["my data", "größe", "100%20", "a?b#c", 'say "x"'])
def test_a_store_whose_path_does_not_fit_into_an_address_is_served(tmp_path: Path, name: str) -> None:
    root = tmp_path / name
    with quire.open(root) as store, store.serve() as server:
        assert " " not in server.address
        for target in (root, server.address):
            with quire.connect(target) as client:
                assert client.table("db").num_rows == 0, "over Flight"
                assert client.path == str(root)
        owner = find_owner(root)
        assert owner is not None
        owner.close()
    assert not (root / SOCKET_POINTER).exists()


def test_another_users_runtime_directory_is_not_used(
    long_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = Path(os.environ["XDG_RUNTIME_DIR"], "quire")
    shared.mkdir()
    shared.chmod(0o755)
    with pytest.raises(quire.NotWritable, match="other users can access"):
        place_of(str(long_path))
    shared.rmdir()
    shared.symlink_to(tmp_path)
    with pytest.raises(quire.NotWritable, match="other users can access"):
        place_of(str(long_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long_path))
    long_path.mkdir(parents=True)
    with pytest.raises(quire.InvalidInput, match="short and plain enough"):
        place_of(str(long_path))


def test_without_a_runtime_directory_the_temporary_one_is_used(
    long_path: Path, short_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setattr("tempfile.tempdir", str(short_directory))
    socket_path = place_of(str(long_path))
    assert os.path.dirname(socket_path.path) == str(short_directory / f"quire-{os.getuid()}")
    assert place_of(str(long_path)) == socket_path


def test_a_killed_owners_socket_is_stale_and_replaced_by_the_next(path: Path, owner: Start) -> None:
    first, _ = owner()
    first.kill()
    first.wait()
    assert (path / SOCKET).exists()
    assert not is_alive(str(path / SOCKET))
    assert find_owner(path) is None
    with pytest.raises(quire.Unavailable):
        quire.connect(path, timeout=0.3)
    second, address = owner()
    with quire.connect(address) as client:
        assert client.server.pid == second.pid
    found_owner = find_owner(path)
    assert found_owner is not None
    with found_owner:
        assert found_owner.server.pid == second.pid


def test_no_owner_is_found_if_none_listens(path: Path) -> None:
    assert find_owner(path) is None
    with quire.open(path):
        assert find_owner(path) is None


def bind_and_fail(socket_path: SocketPath) -> None:
    with binding(socket_path) as bound, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(bound)
        raise ZeroDivisionError


def test_a_failed_bind_leaves_nothing(tmp_path: Path) -> None:
    socket_path = SocketPath(str(tmp_path / "q.sock"), "")
    with pytest.raises(ZeroDivisionError):
        bind_and_fail(socket_path)
    assert os.listdir(tmp_path) == []


def test_a_socket_at_another_path(path: Path, tmp_path: Path) -> None:
    with served(path, f"grpc+unix://{tmp_path}/here.sock") as (_, server), quire.connect(server.address) as client:
        assert client.databases() == []
        assert not (path / SOCKET).exists()


def test_disconnecting_leaks_no_descriptor(tmp_path: Path) -> None:
    """Hazard: a duplicated descriptor stays open for ever, one at each end of a server."""
    with open(tmp_path / "a file", "w"), socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as caller, listener.accept()[0]:
            before = len(os.listdir("/proc/self/fd"))
            assert hang_up(port) == 1
            assert caller.recv(1) == b""
            assert len(os.listdir("/proc/self/fd")) == before
