"""Commands about the archive: on, off, status, drill, abandoned and audit; and `restore-store`, which restores a store from its
bucket alone.

`status` queries the owner, if it serves, and the bucket; without an owner, the directory shows how the store was closed.
`drill` runs in the owner, which compares the restored copy with its open databases.
"""

from __future__ import annotations

import os
import sys
from contextlib import closing
from typing import TYPE_CHECKING, Annotated

from quire.archive.log_reader import owner_log
from quire.archive.state_files import take_archive_state
from quire.archive.window import RestorableRange, abandoned_epochs, restorable_range
from quire.cli.declarations import Argument, Group, Option, command
from quire.cli.errors import OK, PROBLEMS
from quire.cli.formatting import count_of, moment, size, span
from quire.cli.lookup import AllowHttp, Endpoint, Moment, Region, Runner, StoreId, Yes, need_runner
from quire.cli.output import CliResult, Facts, Listing, ListingRow, Note, Report
from quire.cli.prompts import confirm, on_terminal
from quire.core.clock import SystemClock
from quire.core.errors import Conflict, InvalidConfig, InvalidInput, QuireError
from quire.core.json_values import plain
from quire.core.settings import ObjectSettings
from quire.core.time_parsing import parse_moment
from quire.durable import names
from quire.durable.files import OsDisk
from quire.durable.locks import holder, is_held
from quire.jobs.audit.table import write_report
from quire.objects.options import options_of
from quire.service.sockets import find_owner
from quire.store import object_access, restoring
from quire.store.config_edit import change_config
from quire.store.info import StoreReader
from quire.store.layout import objects_url
from quire.store.object_access import open_place
from quire.store.object_location import is_inside, place_of

if TYPE_CHECKING:
    from quire.archive.status import ArchiveStatus, DrillRecord
    from quire.cli.command import Cli
    from quire.core.settings import StoreSettings
    from quire.jobs.archive_audit.audit import ArchiveAudit
    from quire.store.restoring import Restored

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
        Option(metavar="ARCHIVEMODE", help="async: about a second behind; sync: every change waits for the bucket."),
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
        bucket.list_prefixes("")  # raises on a wrong endpoint or credential, before anything is changed
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

    Queries the owner if it serves (`quire serve`), and the bucket. The exit code is 1 if the archive is fenced, stopped or
    behind.
    """
    root, settings = os.path.abspath(cli.path), cli.settings()
    known = archive_status(cli)
    if known is None:
        text = "archiving is off: losing this disk loses everything since the last backup"
        facts = Facts(lines=[("archive", "off"), ("state", text), ("next", "`quire archive on`")], data={"mode": "off"})
        return CliResult(facts, OK)
    in_bucket, unreachable = (None, "") if no_objects else _ask_bucket(cli, root, settings)
    data = {
        **plain(known),
        "safe": known.is_safe and not unreachable,
        "puts_per_month": known.puts_per_month,
        "put_bytes_per_month": known.put_bytes_per_month,
        "dollars_per_month": round(known.dollars_per_month, 2),
        "object_store": objects_url(root, settings),
        "bucket_newest_at_ms": in_bucket.newest_at_ms if in_bucket else 0,
        "bucket_oldest_at_ms": in_bucket.oldest_at_ms if in_bucket else 0,
        "bucket_error": unreachable,
    }
    facts = Facts(lines=_lines(known, in_bucket, unreachable, objects_url(root, settings)), data=data)
    return CliResult(facts, PROBLEMS if known.state in PROBLEM_STATES else OK)


def archive_status(cli: Cli) -> ArchiveStatus | None:
    """Return the status from the owner, else from the directory; `None` if archiving is off."""
    owner = find_owner(cli.path)
    if owner is not None:
        with owner:
            return owner.info().archive
    with StoreReader(cli.path) as store:
        return store.info().archive


def _ask_bucket(cli: Cli, root: str, settings: StoreSettings) -> tuple[RestorableRange | None, str]:
    try:
        with cli.reader() as manifest, manifest.read() as txn, closing(open_place(txn, root, settings)) as bucket:
            return restorable_range(bucket, txn.store_id()), ""
    except QuireError as error:
        return None, error.what


STATES = {
    "archived": "everything is in the bucket: losing this disk now would lose nothing",
    "closed": "closed with everything in the bucket: losing this disk now would lose nothing",
    "uploading": "changes are being uploaded: losing this disk now would lose them",
    "behind": "the bucket does not answer: losing this disk now would lose the backlog",
    "no base": "nothing can be restored yet: the first copy of the store is being uploaded",
    "fenced": "another directory has taken this store over: nothing more is archived from here",
    "stopped": "the archiver has stopped: restart the owner",
    "not closed cleanly": "the last owner ended before its last upload: the next one uploads what is missing",
    "owned": "a process owns the store but does not answer: the bucket shows how far it is",
}


def state_text(status: ArchiveStatus) -> str:
    """Return the state of the archive as a sentence."""
    return STATES.get(status.state, status.state)


def _doubtful(status: ArchiveStatus) -> str:
    """Format a state that the bucket has not confirmed."""
    return f"{status.state} according to this directory; not confirmed by the bucket: do not rely on it"


def _lines(
    status: ArchiveStatus, in_bucket: RestorableRange | None, unreachable: str, place: str
) -> list[tuple[str, str]]:
    now = CLOCK.now_ms()
    promise = {"async": f"uploads every {status.interval_seconds:g} s", "sync": "every change waits for the bucket"}
    lines = [
        ("archive", f"{status.mode}: {promise.get(status.mode, '')}, to {place}"),
        ("state", state_text(status) if not unreachable else _doubtful(status)),
        ("lag", f"{status.lag_seconds:.1f} s"),
        ("waiting", f"{size(status.memory_bytes)} in memory, {size(status.backlog_bytes)} on disk"),
        ("last cut", _ago(status.last_cut_at_ms or (in_bucket.newest_at_ms if in_bucket else 0), now)),
    ]
    newest = max(status.restorable_at_ms, in_bucket.newest_at_ms if in_bucket else 0)
    if in_bucket is not None:
        lines.append(("restorable", f"from {moment(in_bucket.oldest_at_ms)} to {moment(newest)}"))
    elif unreachable:
        lines.append(("restorable", f"to {moment(newest)}; the bucket could not be asked: {unreachable}"))
    else:
        lines.append(("restorable", f"to {moment(newest)}"))
    if status.puts:
        lines += [
            ("uploaded", f"{count_of(status.puts, 'object')}, {size(status.put_bytes)} since the store was opened"),
            (
                "per hour",
                f"{count_of(round(status.puts_per_hour), 'request')}, {size(round(status.put_bytes_per_hour))}",
            ),
            (
                "per month",
                f"about {count_of(status.puts_per_month, 'request')} (US$ {status.dollars_per_month:.2f} at the list price of "
                f"S3), {size(status.put_bytes_per_month)}",
            ),
        ]
    lines.append(("last error", status.last_error or "none"))
    lines.append(("last drill", drill_text(status.last_drill, now)))
    return lines


def _ago(at_ms: int, now_ms: int) -> str:
    return f"{moment(at_ms)} ({span(now_ms - at_ms)} ago)" if at_ms else "never"


def drill_text(drill: DrillRecord | None, now_ms: int) -> str:
    """Format a drill in one line."""
    if drill is None:
        return "never: run `quire archive drill`"
    result = "passed" if drill.is_good else f"FAILED with {count_of(len(drill.problems), 'difference')}"
    return f"{_ago(drill.at_ms, now_ms)}: {result}, restored in {drill.restore_seconds:.1f} s"


# ── drill ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
@command("drill", archive, example="quire archive drill")
def drill(cli: Cli) -> CliResult:
    """Restore the archive to a temporary directory and compare it with the live store.

    Claims nothing, and changes nothing but drill.json, which records the result. A running `quire serve` does it while it
    serves. Downloads the store once. The exit code is 1 if anything differs.
    """
    with cli.owner() as store:
        if store.archive is None:
            raise Conflict(
                "archiving is off: there is nothing to restore", hint="run `quire archive on`", path=store.path
            )
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


# ── restore-store ─────────────────────────────────────────────────────────────────────────────────────────────────────
@command("restore-store", example="quire restore-store s3://my-bucket/shop ./shop --takeover")
def restore_store(
    cli: Cli,
    url: Annotated[str, Argument(metavar="URL", help="The store's bucket: a path, s3://…, gs://…, az://…")],
    directory: Annotated[
        str, Argument(metavar="[DIR]", help="A new directory for the store.", show_default="default: --store")
    ] = "",
    at: Moment = "",
    store_id: StoreId = "",
    takeover: Annotated[bool, Option("--takeover", help="Make DIR the owner, and fence the previous one.")] = False,
    endpoint: Endpoint = "",
    region: Region = "",
    allow_http: AllowHttp = False,
) -> Report:
    """Restore a whole store from its bucket.

    DIR can be read at once, as of the restored moment; large files stay in the bucket and are read on demand. Without
    --takeover nothing is claimed: a running owner continues, and DIR can be written after `quire takeover`. Credentials come
    from the environment (AWS_*, GOOGLE_*, AZURE_*).
    """
    reached = ObjectSettings(endpoint=endpoint, region=region, allow_http=allow_http)
    reached.check("--endpoint")
    at_ms = parse_moment(at, "--at", now_ms=CLOCK.now_ms()) if at else None
    restored = restoring.restore(
        url,
        directory or cli.path,
        at_ms=at_ms,
        store_id=store_id,
        options=options_of(reached, "objects"),
        takeover=takeover,
        progress=_show_progress if on_terminal() else None,
    )
    with StoreReader(restored.path) as store:
        info = store.info()
        mode = info.archive.mode if info.archive is not None else "off"
    databases = ", ".join(f"{count:,} {kind}" for kind, count in info.databases.items() if count) or "no databases"
    step = _next_step(restored, takeover=takeover, past=bool(at))
    lost = _lost_text(restored, mode, past=bool(at))
    facts = Facts(
        lines=[
            ("store", f"{restored.store_id}: {databases}"),
            ("restored", f"the state of {moment(restored.at_ms)} into {restored.path}"),
            ("lost", lost),
            ("read", f"{count_of(restored.objects, 'object')}, {size(restored.bytes)}; {_left_text(restored)}"),
            ("took", f"{restored.seconds:.1f} s"),
        ],
        data=None,
    )
    data = {
        **plain(restored),
        "taken_over": takeover,
        "mode": mode,
        "databases": info.databases,
        "lost": lost,
        "next": step,
    }
    return Report(parts=[facts, Note(text=f"next: {step}", data=None)], data=data)


def _left_text(restored: Restored) -> str:
    remote = count_of(restored.remote_files, "large file")
    return f"{count_of(restored.files, 'file')} written, {remote} left in the bucket"


def _lost_text(restored: Restored, mode: str, *, past: bool) -> str:
    if restored.is_backup:
        return f"changes after the backup of {moment(restored.at_ms)}"
    if past:
        return f"nothing was removed: changes after {moment(restored.at_ms)} are still in the archive"
    if restored.newest != restored.position:
        behind = restored.newest.number - restored.position.number
        return f"{count_of(behind, 'object')} behind this state: their base was never completed"
    if mode == "sync":
        return "no acknowledged change"
    return f"changes after {moment(restored.at_ms)} that had not been uploaded; the bucket cannot show whether there were any"


def _next_step(restored: Restored, *, takeover: bool, past: bool) -> str:
    if restored.is_backup:
        return f"`quire verify --store {restored.path}` reads every byte; the store can be written"
    where = "" if restored.path == os.getcwd() else f" --store {restored.path}"
    if takeover:
        return f"`quire serve{where}`, or open it: it is the owner now"
    discard = " --discard" if past else ""
    return f"`quire ls{where}` reads it; `quire takeover{discard}{where}` makes it the owner, which writes"


def _show_progress(step: str, done: int, total: int) -> None:
    end = "\n" if done == total else ""
    sys.stderr.write(f"\r{step}: {done:,} of {total:,} objects{end}")
    sys.stderr.flush()


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

    They are left by a takeover that went back to an earlier moment (`quire takeover --discard`). They are never deleted
    automatically, and can be restored until you delete them.
    """
    if not remove:
        root = os.path.abspath(cli.path)
        with cli.reader() as manifest, manifest.read() as txn, closing(open_place(txn, root, cli.settings())) as bucket:
            known = abandoned_epochs(bucket, txn.store_id())
        rows = [
            ListingRow(
                [str(left.owner_epoch), str(left.objects), size(left.size_bytes), moment(left.ended_at_ms)], left
            )
            for left in known
        ]
        columns = [">epoch", ">objects", ">size", "archived until"]
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
    store_id: Annotated[str, Option(metavar="ID", help="Which store, if several share the bucket.")] = "",
    report: Annotated[str, Option(metavar="FILE", help="Write the differences to a Parquet file.")] = "",
    runner: Runner = "",
) -> CliResult:
    """Read the whole archive and check that every moment in it can be restored.

    This covers log objects, bases, tables, compressed segments, and the chunks and segments that rows of any restorable moment
    name, compared by their digests. Also lists objects that nothing names. Reads only the bucket. The exit code is 1 if
    something is missing or altered; orphans do not count.
    """
    from quire.store.heavy import audit_bucket  # here: it loads the runners, which other archive commands do not need

    need_runner(runner)
    if url:
        result = audit_bucket(url, store_id=store_id, runner=runner, progress=_PercentRead())
    else:
        with cli.reader() as manifest, manifest.read() as txn:
            place = objects_url(cli.path, cli.settings())
            store_id, options = store_id or txn.store_id(), object_access.options_of(txn, cli.settings(), place)
        result = audit_bucket(place, store_id=store_id, options=options, runner=runner, progress=_PercentRead())
    if report:
        write_report(report, [*result.problems, *result.orphans])
    return _audit_verdict(result)


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
