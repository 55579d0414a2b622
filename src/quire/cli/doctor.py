"""The command `doctor`: is the machine fit, and is anything in the store's way?

Rules
  1. Every finding is `ok`, `note` (worth knowing) or `bad` (needs doing something); exit code 1 if one is bad.
  2. A check that fails is a finding, not an end: the others still run.
  3. Only the object store is written to: one small object, put, read back and deleted. `--no-objects` leaves it out.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from quire.cli.command import Cli, Verdict, command
from quire.cli.exits import OK, PROBLEMS
from quire.cli.output import Listing, Row
from quire.cli.plain import count_of, moment, size
from quire.core.errors import QuireError
from quire.core.limits import GIB

if TYPE_CHECKING:
    from quire.store.store import Store

FREE_BYTES_MIN = GIB
"""Less free space than this is worth a note."""
READERS_FILL_MAX = 0.8


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    check: str
    state: str
    detail: str


def add_to(app: typer.Typer) -> None:
    """Register this command."""
    command(app, "doctor", example="quire doctor --store ./data")(doctor)


def doctor(
    cli: Cli, no_objects: Annotated[bool, typer.Option("--no-objects", help="Do not touch the object store.")] = False
) -> Verdict:
    """See whether machine, store and object store are well.

    Looks at versions, disk, the lock's holder, readers and map of the manifest, and does a round trip to the object store.
    """
    findings = [*_machine(), *_store(cli, with_objects=not no_objects)]
    bad = sum(each.state == "bad" for each in findings)
    shown = Listing(
        columns=["check", "state", "detail"],
        rows=[Row([each.check, each.state, each.detail], each) for each in findings],
        closing=f"{count_of(bad, 'thing')} to look after" if bad else "all is well",
    )
    return Verdict(shown, PROBLEMS if bad else OK)


def _machine() -> Iterator[Finding]:
    import platform
    from importlib.metadata import version

    yield Finding("quire", "ok", version("quire"))
    yield Finding("python", "ok", f"{platform.python_version()} ({sys.executable})")
    yield Finding("platform", "ok", f"{platform.platform(terse=True)}, {count_of(os.cpu_count() or 1, 'core')}")
    yield Finding("lmdb", "ok", version("lmdb"))


def _store(cli: Cli, *, with_objects: bool) -> Iterator[Finding]:
    try:
        store = cli.reader()
    except QuireError as error:
        yield Finding("store", "bad", str(error))
        yield from _guarded("disk", lambda: _disk(cli.path))
        return
    with store:
        yield Finding("store", "ok", store.path)
        yield from _guarded("disk", lambda: _disk(store.path))
        yield from _guarded("owner", lambda: _owner(store))
        yield from _guarded("readers", lambda: _readers(store))
        yield from _guarded("map", lambda: _map(store))
        if with_objects:
            yield from _guarded("objects", lambda: _objects(store))


def _guarded(check: str, look: Callable[[], Finding]) -> Iterator[Finding]:
    """Rule 2."""
    try:
        yield look()
    except (QuireError, OSError) as error:
        yield Finding(check, "bad", str(error))


def _disk(path: str) -> Finding:
    while not os.path.exists(path):
        path = os.path.dirname(os.path.abspath(path))
    usage = shutil.disk_usage(path)
    state = "note" if usage.free < FREE_BYTES_MIN else "ok"
    return Finding("disk", state, f"{size(usage.free)} free of {size(usage.total)}")


def _owner(store: Store) -> Finding:
    from quire.durable import names
    from quire.durable.locks import holder, is_held

    path = os.path.join(store.path, names.LOCK)
    if not is_held(path):
        return Finding("owner", "ok", "nobody owns the store now")
    found = holder(path)
    if found is None:
        return Finding("owner", "note", "some process owns the store; it did not say which")
    return Finding("owner", "ok", f"process {found.pid} on {found.host} since {moment(found.since_ms)}")


def _readers(store: Store) -> Finding:
    figures = store.manifest.env.info()
    used, slots = figures["num_readers"], figures["max_readers"]
    state = "note" if used > slots * READERS_FILL_MAX else "ok"
    return Finding("readers", state, f"{used:,} of {slots:,} slots of the manifest were in use at once")


def _map(store: Store) -> Finding:
    env = store.manifest.env
    figures = env.info()
    state = "note" if env.is_nearly_full() else "ok"
    return Finding("map", state, f"{size(figures['file_bytes'])} used of {size(figures['map_size'])} reserved")


def _objects(store: Store) -> Finding:
    from quire.core.clock import SystemClock

    clock = SystemClock()
    key, body = f"doctor/{os.urandom(8).hex()}", os.urandom(1024)
    began = clock.monotonic()
    store.objects.put(key, body, create_only=True)
    same = store.objects.get(key) == body
    store.objects.delete(key)
    milliseconds = (clock.monotonic() - began) * 1000
    if not same:
        return Finding("objects", "bad", f"{store.objects_url} gave back other bytes than it was given")
    return Finding("objects", "ok", f"put, get, delete in {milliseconds:.1f} ms: {store.objects_url}")
