"""The process that serves a copy of an archived store to Spark: `python -m quire.store.archive_copy_server`.

It reads a `CopyRequest` from standard input, opens the copy, and writes `ready` and the copy's directory, or an error, to
standard output. The copy is removed when the process ends; see `service/archive_copies.py`.

Threads: one. Raises nothing: errors are written as the answer.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from contextlib import closing
from typing import TYPE_CHECKING

import msgspec

from quire.core.clock import SystemClock
from quire.core.decoding import described
from quire.core.errors import QuireError, StorageFault
from quire.core.time_parsing import parse_moment
from quire.durable.files import OsDisk
from quire.objects.options import options_at
from quire.service.archive_copies import ANSWER_BYTES_MAX, IDLE_SECONDS, READY, CopyRequest
from quire.service.wire import write_form
from quire.store import layout
from quire.store.archive_copy import open_archive

if TYPE_CHECKING:
    from quire.service.server import Server
    from quire.store.store import Store

LOOK_SECONDS = 5.0
"""Interval between checks for activity."""


def main() -> int:
    """Serve the requested copy until the driver ends or stops using it. Return the exit code."""
    request = msgspec.json.decode(sys.stdin.buffer.read(ANSWER_BYTES_MAX), type=described(CopyRequest))
    answer = os.dup(1)
    with open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), 1)  # so that closing `answer` is the end of file for its reader
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # exits normally, which removes the copy's directory
    try:
        copy = opened(request)
    except QuireError as error:
        os.write(answer, write_form(error))
        return 1
    except OSError as error:
        os.write(answer, write_form(StorageFault("the copy could not be opened", cause=str(error))))
        return 1
    with copy, closing(copy.serve()) as server:
        os.write(answer, READY + os.fsencode(copy.path))
        os.close(answer)
        wait(server, request.driver)
    return 0


def opened(request: CopyRequest) -> Store:
    """Open the requested copy."""
    at_ms = parse_moment(request.at, "archived_at", now_ms=SystemClock().now_ms()) if request.at else None
    options = None
    if request.config:
        options = options_at(request.url, layout.read_config(OsDisk(), request.config, None), [])
    return open_archive(request.url, at_ms=at_ms, store_id=request.store_id, options=options)


def wait(server: Server, driver: int) -> None:
    """Return when the driver has ended, or no call has arrived for `IDLE_SECONDS`."""
    try:
        ended = os.pidfd_open(driver)
    except OSError:
        return  # it has ended already
    seen, last = server.figures(), time.monotonic()
    while time.monotonic() - last < IDLE_SECONDS:
        if select.select([ended], [], [], LOOK_SECONDS)[0]:
            return
        now = server.figures()
        if now != seen or now.calls_now or now.streams_now:
            seen, last = now, time.monotonic()


if __name__ == "__main__":
    sys.exit(main())
