"""Commands about the archive: on, off, status, drill, base, abandoned and audit; and `restore-store`, which restores a store
from its bucket alone.

`status` queries the owner, if it serves, and the bucket; without an owner, the directory shows how the store was closed.
`drill` runs in the owner, which compares the restored copy with its open databases.
"""

from __future__ import annotations

import os
import shlex
import sys
from contextlib import closing
from typing import TYPE_CHECKING, Annotated

from quire.archive.log_reader import owner_log
from quire.archive.state_files import take_archive_state
from quire.archive.window import abandoned_epochs
from quire.cli.archive_state import (
    CLOSED_STATES,
    COPY_STATES,
    STATES,
    InBucket,
    ask_bucket,
    bucket_lines,
    copy_text,
    cost_lines,
    doubt_about,
    doubtful_text,
    promise_text,
    state_text,
    waiting_lines,
)
from quire.cli.declarations import Argument, Group, Option, command
from quire.cli.errors import OK, PROBLEMS
from quire.cli.formatting import count_of, drill_text, moment, size
from quire.cli.lookup import (
    AllowHttp,
    Endpoint,
    Region,
    Runner,
    StoreId,
    Yes,
    need_report_path,
    need_runner,
    options_given,
)
from quire.cli.output import CliResult, Facts, Listing, ListingRow, Note, Report
from quire.cli.prompts import confirm, on_terminal
from quire.core.clock import SystemClock
from quire.core.errors import Conflict, InvalidConfig, InvalidInput
from quire.core.json_values import plain
from quire.durable import names
from quire.durable.files import OsDisk
from quire.durable.locks import holder, is_held
from quire.jobs.audit.table import write_report
from quire.objects.round_trip import round_trip
from quire.store.config_edit import change_config
from quire.store.info import StoreReader
from quire.store.layout import DirectoryState, directory_state, objects_url
from quire.store.object_access import open_place
from quire.store.object_access import options_of as place_options
from quire.store.object_location import is_inside, place_of

if TYPE_CHECKING:
    from quire.archive.status import ArchiveStatus
    from quire.cli.command import Cli
    from quire.core.settings import StoreSettings
    from quire.jobs.archive_audit.audit import ArchiveAudit

archive = Group("archive")

MODES = ("async", "sync")
FIRST_BASE_SECONDS = 24 * 3_600.0
"""How long `archive on` waits for the first upload of the whole store; after Ctrl-C the next owner continues it."""
PROBLEM_STATES = ("fenced", "stopped", "behind")
LISTED = 50
"""Most differences to show as text; `--report` and `--json` have all of them."""
CLOCK = SystemClock()


# ── on and off ────────────────────────────────────────────────────────────────────────────────────────────────────────
@command("on", archive, example="quire archive on --mode async")
def on(
    cli: Cli,
    mode: Annotated[
        str,
        Option(metavar="async|sync", help="async: about a second behind; sync: every change waits for the bucket."),
    ] = "async",
) -> Note:
    """Archive the whole store to its bucket continuously.

    Sets `archive.mode` in quire.toml. If no process owns the store, the first copy is uploaded now; otherwise the owner
    uploads it when it is restarted. The object store must be outside the store's directory.
    """
    if mode not in MODES:
        raise InvalidInput(
            "unknown archive mode", hint="use async or sync; `quire archive off` ends archiving", mode=mode
        )
    root, settings = os.path.abspath(cli.path), cli.settings()
    _need_outside(root, settings)
    with cli.reader() as manifest, manifest.read() as txn, closing(open_place(txn, root, settings)) as bucket:
        # Before anything is changed: with credentials that may only read, the first upload would be retried for ever.
        bucket.list_prefixes("")
        round_trip(bucket)
        is_emptied = not owner_log(bucket, txn.store_id(), txn.owner_epoch()).positions if txn.owner_epoch() else True
    change_config(OsDisk(), root, {("archive", "mode"): mode})
    place = objects_url(root, settings)
    data = {"mode": mode, "object_store": place, "restart_owner": False, "archived": False}
    if is_held(os.path.join(root, names.LOCK)):
        text = f"archive.mode is {mode} now; {_owner_text(root)} must be restarted: it archives to {place} from then on"
        return Note(text=text, data=data | {"restart_owner": True})
    if is_emptied:
        take_archive_state(OsDisk(), root)  # a new bucket has none of what the old one had, so a base must be written
    with cli.owner() as store:
        assert store.archive is not None
        store.archive.wait(FIRST_BASE_SECONDS)
        status = store.archive.status()
    text = f"archive.mode is {mode} now; the whole store is in {place}: {_uploaded_text(status)}"
    return Note(text=text, data=data | {"archived": True, "objects": status.puts, "bytes": status.put_bytes})


@command("off", archive, example="quire archive off")
def off(cli: Cli) -> Note:
    """Stop archiving. The archive stays, but is no longer updated.

    Objects that were kept only for past moments are deleted by the next round of maintenance: those moments can then no longer
    be restored.
    """
    root = os.path.abspath(cli.path)
    was = cli.settings().archive.mode
    change_config(OsDisk(), root, {("archive", "mode"): "off"})
    restart = was != "off" and is_held(os.path.join(root, names.LOCK))
    text = "archive.mode is off now" + (f"; {_owner_text(root)} archives until it is restarted" if restart else "")
    return Note(text=text, data={"mode": "off", "was": was, "restart_owner": restart})


def _uploaded_text(status: ArchiveStatus) -> str:
    if not status.puts:
        return "nothing had to be uploaded"
    return f"{count_of(status.puts, 'object')}, {size(status.put_bytes)}"


def _need_outside(root: str, settings: StoreSettings) -> None:
    place = place_of(root, settings.object_store)
    if not is_inside(root, place) and not place.startswith("memory://"):
        return
    path = objects_url(root, settings)
    has_objects = os.path.isdir(path) and bool(os.listdir(path))
    move = (
        f"copy {path} there, set object_store, run `quire objects moved`, "
        if has_objects
        else "set object_store to it, "
    )
    raise InvalidConfig(
        "the object store is inside the store's directory: it would be lost with it",
        hint=f"choose a bucket or a directory on another disk; {move}then run `quire archive on` again",
        object_store=path,
        config=os.path.join(root, names.CONFIG),
    )


def _owner_text(root: str) -> str:
    owner = holder(os.path.join(root, names.LOCK))
    return f"the owner (process {owner.pid} on {owner.host})" if owner is not None else "the owner"


# ── status ────────────────────────────────────────────────────────────────────────────────────────────────────────────
@command("status", archive, example="quire archive status --json")
def status(
    cli: Cli, no_objects: Annotated[bool, Option("--no-objects", help="Do not ask the object store.")] = False
) -> CliResult:
    """Show what is archived, what waits, what can be restored and what it costs.

    Queries the owner if it serves (`quire serve`), and the bucket; only a serving owner knows the cost. The exit code is 1 if
    the archive is fenced, stopped or behind, or if the bucket does not confirm what the directory says.
    """
    root, settings = os.path.abspath(cli.path), cli.settings()
    known = _known_status(cli)
    if known is None:
        text = "archiving is off: losing this disk loses everything since the last backup"
        facts = Facts(lines=[("archive", "off"), ("state", text), ("next", "`quire archive on`")], data={"mode": "off"})
        return CliResult(facts, OK)
    in_bucket = InBucket()
    if not no_objects:
        with cli.reader() as manifest, manifest.read() as txn:
            in_bucket = ask_bucket(txn, root, settings)
    doubt = doubt_about(known, in_bucket)
    if in_bucket.newer_owner and known.state in CLOSED_STATES:
        doubt = f"{STATES['fenced']} ({in_bucket.newer_owner})"
    data = {
        **plain(known),
        "safe": known.is_safe and not doubt,
        "puts_per_month": known.puts_per_month,
        "put_bytes_per_month": known.put_bytes_per_month,
        "dollars_per_month": round(known.dollars_per_month, 2),
        "object_store": objects_url(root, settings),
        "bucket_newest_at_ms": in_bucket.range.newest_at_ms if in_bucket.range else 0,
        "bucket_oldest_at_ms": in_bucket.range.oldest_at_ms if in_bucket.range else 0,
        "bucket_objects": in_bucket.range.objects if in_bucket.range else 0,
        "bucket_bytes": in_bucket.range.size_bytes if in_bucket.range else 0,
        "bucket_error": doubt,
        "clones": in_bucket.clones,
        "standbys": in_bucket.standbys,
        "retired": in_bucket.retired,
    }
    lines = [
        ("archive", f"{known.mode}: {promise_text(known)}, to {objects_url(root, settings)}"),
        ("state", doubtful_text(known, in_bucket, doubt) if doubt else state_text(known)),
        *([("copy", copy_text(root, known.state))] if known.state in COPY_STATES else []),
        *waiting_lines(known),
        *bucket_lines(known, in_bucket),
        *cost_lines(known),
        ("last drill", drill_text(known.last_drill, CLOCK.now_ms())),
    ]
    is_problem = known.state in PROBLEM_STATES or bool(doubt)
    return CliResult(Facts(lines=lines, data=data), PROBLEMS if is_problem else OK)


def _known_status(cli: Cli) -> ArchiveStatus | None:
    """Return the status from the owner if it serves, otherwise from the directory; `None` if archiving is off."""
    owner = cli.listening_owner()
    if owner is not None:
        with owner:
            return owner.info().archive
    with StoreReader(cli.path) as store:
        return store.info().archive


# ── drill ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
@command("drill", archive, example="quire archive drill")
def drill(cli: Cli) -> CliResult:
    """Restore the archive to a temporary directory and compare it with the live store.

    Claims nothing, and changes nothing but drill.json, which records the result. A running `quire serve` does it while it
    serves. Downloads the store once. The exit code is 1 if anything differs.
    """
    with cli.owner() as store:
        if store.archive is None:
            raise _off(store.path)
        record = store.archive.drill()
    outcome = "equal" if record.is_good else f"{count_of(len(record.problems), 'difference')}"
    lines = [
        ("drill", "passed" if record.is_good else "FAILED"),
        ("restored", f"the state of {moment(record.restored_at_ms)} in {record.restore_seconds:.1f} s"),
        ("compared", f"{count_of(record.databases, 'database')}, {size(record.bytes)}: {outcome}"),
        ("took", f"{record.seconds:.1f} s"),
        *([("left out", f"{count_of(record.changed_keys, 'key')} changed meanwhile")] if record.changed_keys else []),
        *[("problem", problem) for problem in record.problems],
    ]
    data = {**plain(record), "passed": record.is_good}
    return CliResult(Facts(lines=lines, data=data), OK if record.is_good else PROBLEMS)


@command("base", archive, example="quire archive base")
def base(cli: Cli) -> Note:
    """Upload the whole store to the archive again.

    After a drill has failed, or objects were lost from the bucket: the next restore reads the new copy alone. Earlier moments
    are not repaired. Chunks that a checkpoint has uploaded are not part of it; `quire verify` reads those.
    """
    with cli.owner() as store:
        if store.archive is None:
            raise _off(store.path)
        store.archive.base()
        status = store.archive.status()
    text = f"uploaded the whole store again; it can be restored to {moment(status.restorable_at_ms)}"
    return Note(text=text, data={"restorable_at_ms": status.restorable_at_ms})


def _off(path: str) -> Conflict:
    return Conflict("archiving is off: nothing is in the bucket", hint="run `quire archive on`", path=path)


# ── abandoned epochs ──────────────────────────────────────────────────────────────────────────────────────────────────
@command("abandoned", archive, example="quire archive abandoned")
def abandoned(
    cli: Cli,
    remove: Annotated[
        int, Option("--remove", metavar="EPOCH", min=0, show_default=False, help="Delete all objects of this epoch.")
    ] = 0,
    yes: Yes = False,
) -> Listing | Note:
    """List owner epochs that the store's history does not contain, or delete one of them.

    They are left by a takeover that went back to an earlier moment (`quire takeover --discard`): whole epochs, and the end of
    the epoch that was restored. Whole epochs are never deleted automatically; the end of one leaves with the window. The
    command in the last column restores one. Objects that it shares with the newest owner's history are kept while the window
    reaches back to the takeover.
    """
    if not remove:
        root = os.path.abspath(cli.path)
        with cli.reader() as manifest, manifest.read() as txn, closing(open_place(txn, root, cli.settings())) as bucket:
            known = abandoned_epochs(bucket, txn.store_id())
            url = bucket.url
        rows = [
            ListingRow(
                [
                    str(left.owner_epoch),
                    "all" if left.after is None else f"after {left.after}",
                    str(left.objects),
                    size(left.size_bytes),
                    moment(left.ended_at_ms),
                    f"quire restore-store {shlex.quote(url)} DIR --epoch {left.owner_epoch}"
                    if left.is_restorable
                    else "",
                ],
                left,
            )
            for left in known
        ]
        columns = [">epoch", "abandoned", ">objects", ">size", "archived until", "restore it with"]
        return Listing(columns=columns, rows=rows, empty="no abandoned owner epochs")
    if not yes:
        question = f"delete everything that owner epoch {remove} has in the bucket? It cannot be restored afterwards."
        confirm(question, "nothing was deleted", {"removed": 0})
    with cli.owner() as store:
        objects = store.heavy.remove_abandoned(remove)
    return Note(text=f"deleted {count_of(objects, 'object')} of owner epoch {remove}", data={"removed": objects})


# ── audit ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
@command("audit", archive, example="quire archive audit s3://my-bucket/shop")
def audit(
    cli: Cli,
    url: Annotated[
        str, Argument(metavar="[URL]", help="The bucket, if the store's directory is lost.", show_default="the store's")
    ] = "",
    store_id: StoreId = "",
    report: Annotated[str, Option(metavar="FILE", help="Write the differences to a Parquet file.")] = "",
    runner: Runner = "",
    endpoint: Endpoint = "",
    region: Region = "",
    allow_http: AllowHttp = False,
) -> CliResult:
    """Read the whole archive and check that every moment in it can be restored.

    This covers log objects, bases, tables, compressed segments, and the chunks and segments that rows of any restorable moment
    name, compared by their digests. Also lists objects that nothing names. Reads only the bucket. The exit code is 1 if
    something is missing or altered; orphans do not count.
    """
    from quire.store.heavy import audit_bucket  # here: it loads the runners, which other archive commands do not need

    need_runner(runner)
    need_report_path(report)
    options = options_given(endpoint, region, allow_http)
    if not url or _is_own_bucket(cli, url):
        with cli.reader() as manifest, manifest.read() as txn:
            url = objects_url(cli.path, cli.settings())
            store_id, options = store_id or txn.store_id(), options or place_options(txn, cli.settings(), url)
    result = audit_bucket(url, store_id=store_id, options=options, runner=runner, progress=_PercentRead())
    if report:
        write_report(report, [*result.problems, *result.orphans])
    return _audit_verdict(result)


def _is_own_bucket(cli: Cli, url: str) -> bool:
    """Return whether a URL is that of the bucket of the store at hand, whose quire.toml then says how it is reached."""
    root = os.path.abspath(cli.path)
    if directory_state(OsDisk(), root) is not DirectoryState.STORE:
        return False
    return place_of(root, url) == place_of(root, cli.settings().object_store)


class _PercentRead:
    """Shows the progress in percent, on a terminal."""

    def __init__(self) -> None:
        self._shown = -1

    def __call__(self, done: int, total: int) -> None:
        percent = done * 100 // max(total, 1)
        if percent != self._shown and on_terminal():
            self._shown = percent
            sys.stderr.write(f"\r{percent} % read" + ("\n" if done >= total else ""))
            sys.stderr.flush()


def _audit_verdict(audit: ArchiveAudit) -> CliResult:
    lines = [
        ("store", audit.store_id),
        ("restorable", f"{moment(audit.oldest_at_ms)} to {moment(audit.newest_at_ms)}" if audit.oldest_at_ms else "-"),
        ("read", f"{count_of(audit.objects, 'object')}, {size(audit.size_bytes)}; {audit.log_objects:,} of the log"),
        ("missing or altered", f"{len(audit.problems):,}"),
        ("orphans", f"{len(audit.orphans):,}, {size(sum(row['size_bytes'] for row in audit.orphans))}"),
    ]
    if audit.abandoned:
        epochs = ", ".join(f"epoch {epoch}: {count_of(n, 'object')}" for epoch, n in sorted(audit.abandoned.items()))
        lines.append(("abandoned", f"{epochs}; removed only by name"))
    differences = [*audit.problems, *audit.orphans]
    left = len(differences) - LISTED
    listing = Listing(
        columns=["state", "object", "what"],
        rows=[
            ListingRow([row["state"].lower(), row["artifact"] or "-", row["what"]], row) for row in differences[:LISTED]
        ],
        empty="every moment can be restored",
        closing=f"{left:,} more: `--report FILE` lists all" if left > 0 else "",
    )
    data = {
        "store_id": audit.store_id,
        "oldest_at_ms": audit.oldest_at_ms,
        "newest_at_ms": audit.newest_at_ms,
        "log_objects": audit.log_objects,
        "objects": audit.objects,
        "size_bytes": audit.size_bytes,
        "runner": audit.runner,
        "problems": audit.problems,
        "orphans": audit.orphans,
        "abandoned": {str(epoch): n for epoch, n in audit.abandoned.items()},
    }
    shown = Report(parts=[Facts(lines=lines, data=None), listing], data=data)
    return CliResult(shown, OK if audit.is_sound else PROBLEMS)
