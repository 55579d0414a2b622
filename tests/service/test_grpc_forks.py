"""A forked child survives the gRPC servers and clients that it inherits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.service.owners import end, line, process

PROGRAM = """
import gc, os, sys, time, quire
directory, token, child_program = sys.argv[1:]
store = quire.open(directory)
server = store.serve("grpc://localhost:0", admin_token_file=token)
client = quire.connect(server.address, token_file=token)
client.databases()
gc.disable()
store.manifest.env.fork_hooks.append(gc.collect)  # runs in the child before the hooks of the service
other = quire.connect(server.address, token_file=token)
other.databases()
garbage = [other._channel._client]
garbage.append(garbage)
other._channel._client = None
del garbage
child = os.fork()
if not child:
    exec(child_program)
deadline = time.monotonic() + 60
while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < deadline:
    time.sleep(0.02)
if ended[0]:
    print("ended with", os.waitstatus_to_exitcode(ended[1]), flush=True)
else:
    os.kill(child, 9)
    print("hangs", flush=True)
client.databases()
store.close()
"""
COLLECTS = "del server._flight_server, client._channel._client; gc.collect(); os._exit(7)"
RETURNS = "sys.exit(7)"


@pytest.mark.parametrize("child", [COLLECTS, RETURNS], ids=["collects garbage", "returns"])
def test_a_forked_child_does_not_wait_for_threads_of_grpc(child: str, path: Path, tmp_path: Path) -> None:
    """Hazard: a child hung when it collected, or returned with, the parent's server: gRPC's destructors join threads. It also
    hung if another module's hook after the fork collected garbage first."""
    token = tmp_path / "token"
    token.touch(0o600)
    token.write_text("a-secret-of-the-owner-0123456789")
    started = process(PROGRAM, str(path), str(token), child)
    try:
        assert line(started) == "ended with 7"
        assert started.wait(60) == 0
    finally:
        end(started)
