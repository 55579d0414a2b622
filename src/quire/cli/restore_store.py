"""`quire restore-store`: restores a whole store from its bucket or from a backup."""

from __future__ import annotations

import os
import shlex
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

from quire.cli.declarations import Argument, Option, command
from quire.cli.formatting import count_of, databases_text, size
from quire.cli.lookup import AllowHttp, Endpoint, Moment, OwnerEpoch, Region, StoreId, moment_given, options_given
from quire.cli.output import Facts, Note, Report
from quire.cli.prompts import on_terminal
from quire.core.clock import SystemClock, moment
from quire.core.json_values import plain
from quire.store import restoring
from quire.store.info import StoreReader

if TYPE_CHECKING:
    from quire.cli.command import Cli
    from quire.store.cloning import Cloned
    from quire.store.restoring import Restored

CLOCK = SystemClock()


@command("restore-store", example="quire restore-store s3://my-bucket/shop ./shop --takeover")
def restore_store(
    cli: Cli,
    url: Annotated[str, Argument(metavar="URL", help="The store's bucket or a backup: a path, s3://…, gs://…, az://…")],
    directory: Annotated[
        str, Argument(metavar="[DIR]", help="A new directory for the store.", show_default="default: --store")
    ] = "",
    at: Moment = "",
    epoch: OwnerEpoch = 0,
    store_id: StoreId = "",
    takeover: Annotated[bool, Option("--takeover", help="Make DIR the owner, and fence the previous one.")] = False,
    endpoint: Endpoint = "",
    region: Region = "",
    allow_http: AllowHttp = False,
) -> Report:
    """Restore a whole store from its bucket or a backup.

    DIR can be read at once, as of the restored moment; large files stay in the bucket and are read on demand. Without
    --takeover, a running owner stays the owner, and DIR is read-only until `quire takeover`. Credentials come
    from the environment (AWS_*, GOOGLE_*, AZURE_*).
    """
    at_ms = moment_given(at)
    restored = restoring.restore(
        url,
        directory or cli.path,
        at_ms=at_ms,
        epoch=epoch or None,
        store_id=store_id,
        options=options_given(endpoint, region, allow_http),
        takeover=takeover,
        progress=_show_progress if on_terminal() else None,
    )
    with StoreReader(restored.path) as store:
        info = store.info()
        mode = info.archive.mode if info.archive is not None else "off"
    databases = databases_text(info.databases) or "no databases"
    step = _next_step(restored, takeover=takeover, past=bool(at or epoch or restored.damaged))
    lost = _lost_text(restored, mode, past=bool(at or epoch))
    facts = Facts(
        lines=[
            ("store", f"{restored.store_id}: {databases}"),
            ("restored", f"the state of {moment(restored.at_ms)} into {restored.path}"),
            ("lost", lost),
            *([("abandoned", abandoned_text("restore-store", url, restored))] if restored.abandoned else []),
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
    if restored.is_backup:
        return f"{count_of(restored.files, 'file')} written: everything is in the directory"
    remote = count_of(restored.remote_files, "large file")
    return f"{count_of(restored.files, 'file')} written, {remote} left in the bucket"


def _lost_text(restored: Restored, mode: str, *, past: bool) -> str:
    if restored.is_backup:
        return f"changes after the backup of {moment(restored.at_ms)}"
    if restored.damaged:
        behind = restored.newest.number - restored.position.number
        return f"{count_of(behind, 'object')} after this state: object {restored.damaged[0]} of the log is damaged"
    if past:
        return f"nothing was removed: changes after {moment(restored.at_ms)} are still in the archive"
    if restored.newest != restored.position:
        behind = restored.newest.number - restored.position.number
        return f"{count_of(behind, 'object')} behind this state: their base was never completed"
    if mode == "sync":
        return "no acknowledged change"
    return f"changes after {moment(restored.at_ms)} that had not been uploaded; the bucket cannot show whether there were any"


def abandoned_text(verb: str, url: str, result: Restored | Cloned) -> str:
    """Return that the store had another state at the requested time, and the command that restores or clones it."""
    assert result.abandoned is not None
    at = datetime.fromtimestamp(result.abandoned_at_ms / 1000, UTC).isoformat(timespec="milliseconds")
    epoch = result.abandoned.epoch
    return (
        f"at that time the store was in a state of owner epoch {epoch} that a takeover has abandoned; this is the last one "
        f"before it that is in the newest owner's history. For the other: "
        f"`quire {verb} {shlex.quote(url)} DIR --at {at} --epoch {epoch}`"
    )


def _next_step(restored: Restored, *, takeover: bool, past: bool) -> str:
    if restored.is_backup:
        return f"`quire verify --store {shlex.quote(restored.path)}` reads every byte; the store is writable"
    where = "" if restored.path == os.getcwd() else f" --store {shlex.quote(restored.path)}"
    if takeover:
        return f"`quire serve{where}`, or open it: it is now the owner"
    discard = " --discard" if past else ""
    return f"`quire ls{where}` reads it; `quire takeover{discard}{where}` makes it the owner"


def _show_progress(step: str, done: int, total: int) -> None:
    end = "\n" if done == total else ""
    sys.stderr.write(f"\r{step}: {done:,} of {total:,} objects{end}")
    sys.stderr.flush()
