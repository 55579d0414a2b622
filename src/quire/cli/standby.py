"""Commands about copies of a whole store: standby and promote, clone, and the clones that a store keeps objects for.

`standby` runs in the foreground until it is interrupted or has become the owner; a supervisor then starts `quire serve`.
"""

from __future__ import annotations

import os
import sys
from contextlib import closing
from typing import TYPE_CHECKING, Annotated

from quire.archive import clones as registered
from quire.archive.standbys import Promoted, StandbyStatus
from quire.archive.state_files import read_standby_state
from quire.cli.declarations import Argument, Group, Option, command
from quire.cli.lookup import (
    AllowHttp,
    Endpoint,
    Log,
    Moment,
    OwnerEpoch,
    Region,
    StoreId,
    Yes,
    log_to,
    moment_given,
    options_given,
)
from quire.cli.output import Listing, ListingRow, Note, until_interrupted
from quire.cli.prompts import confirm
from quire.cli.restore_store import abandoned_text
from quire.core.clock import moment
from quire.core.errors import ObjectNotFound
from quire.core.json_values import plain
from quire.durable.files import OsDisk
from quire.store import cloning
from quire.store import standby as standbys
from quire.store.object_access import open_place

if TYPE_CHECKING:
    from quire.cli.command import Cli

clones = Group("clones")

Directory = Annotated[str, Argument(metavar="DIR", help="The directory of the standby.")]


@command("standby", example="quire standby ./bucket ./standby --promote-after 15")
def standby(
    cli: Cli,
    url: Annotated[str, Argument(metavar="URL", help="The store's bucket: a path, s3://…, gs://…, az://…")],
    directory: Directory,
    store_id: StoreId = "",
    promote_after: Annotated[
        float,
        Option(
            "--promote-after",
            metavar="SECONDS",
            help="Take over when the owner has been silent for this long; more than 10.",
            show_default="never",
        ),
    ] = 0.0,
    once: Annotated[bool, Option("--once", help="Apply what is in the bucket, then exit.")] = False,
    endpoint: Endpoint = "",
    region: Region = "",
    allow_http: AllowHttp = False,
    log: Log = "",
) -> Note:
    """Keep a directory up to date with a store's archive.

    The directory is restored if it is empty, then every change is applied as it appears in the bucket. Other processes can
    read it with mode "r" at any time. The command ends with Ctrl-C or SIGTERM, or when the directory has become the owner:
    then open it, or run `quire serve`.
    """
    log_to(log)
    standbys.check_promote_after(promote_after or None)
    options = options_given(endpoint, region, allow_http)
    with (
        until_interrupted() as ending,
        standbys.Standby(url, directory, store_id=store_id, options=options) as follower,
    ):
        promoted = None
        if not promote_after or not follower.is_promoting:
            follower.poll()  # raises before anything is reported as followed
        _announce(cli, follower.status)
        if not once:
            promoted = follower.run(promote_after=promote_after or None, stop=ending)
        status = follower.status
    if promoted is not None:
        return _promoted_note(promoted)
    text = f"{status.path} has the state of {moment(status.at_ms)} (object {status.position})"
    return Note(text=text, data={"promoted": None, **plain(status)})


def _announce(cli: Cli, status: StandbyStatus) -> None:
    """Report that following has begun, and flush: a program that starts this command in the background waits for the line."""
    stream = sys.stderr if cli.as_json else sys.stdout
    stream.write(f"following {status.store_id} (pid {os.getpid()})\n")
    stream.flush()


@command("promote", example="quire promote ./standby --yes")
def promote(
    _cli: Cli,
    directory: Directory,
    discard: Annotated[
        bool, Option("--discard", help="Discard what another owner wrote, or what the standby cannot apply.")
    ] = False,
    yes: Yes = False,
) -> Note:
    """Make a standby the owner of its store.

    The standby applies everything that the owner has archived, seals the owner's log and takes over. The former owner is
    fenced: it acknowledges nothing more. Stop `quire standby` in this directory first.
    """
    if not yes and read_standby_state(OsDisk(), directory) is not None:  # otherwise the promotion is refused
        question = f"make {directory} the owner? The owner that it follows is fenced."
        confirm(question, "nothing was promoted", {"promoted": None})
    return _promoted_note(standbys.promote(directory, discard=discard))


def _promoted_note(promoted: Promoted) -> Note:
    text = (
        f"{promoted.path} is now the owner, in owner epoch {promoted.owner_epoch}, with everything up to object "
        f"{promoted.position} of the former owner ({promoted.seconds:.1f} s)"
    )
    if promoted.dropped:
        text += f"\nlost: the {promoted.dropped:,} objects after it, up to {promoted.newest}"
    return Note(text=text, data={"promoted": plain(promoted)})


# ── clones ────────────────────────────────────────────────────────────────────────────────────────────────────────────
@command("clone", example="quire clone ./bucket ./copy")
def clone(
    _cli: Cli,
    source: Annotated[str, Argument(metavar="SOURCE", help="The bucket of an archived store, or its directory.")],
    directory: Annotated[str, Argument(metavar="DIR", help="A new directory for the clone.")],
    at: Moment = "",
    epoch: OwnerEpoch = 0,
    store_id: StoreId = "",
    endpoint: Endpoint = "",
    region: Region = "",
    allow_http: AllowHttp = False,
) -> Note:
    """Create a new store from the current or an earlier state of another one.

    The clone has its own identity and is writable at once. Large files are not copied: the clone reads them below the
    parent's prefix of the bucket, and the parent keeps them until `quire clones release`. It stays in that bucket;
    to move it to another one, back it up and restore the backup.
    """
    options = options_given(endpoint, region, allow_http)
    at_ms = moment_given(at)
    cloned = cloning.clone(source, directory, at_ms=at_ms, epoch=epoch or None, store_id=store_id, options=options)
    at = moment(cloned.at_ms)
    text = f"{cloned.path} is store {cloned.store_id}, as {cloned.parent_id} was at {at} ({cloned.seconds:.1f} s)"
    if cloned.damaged:
        text += f"\nlater changes are not in it: object {cloned.damaged[0]} of the log is damaged"
    if cloned.abandoned is not None:
        text += f"\n{abandoned_text('clone', source, cloned)}"
    return Note(text=text, data=cloned)


@command("ls", clones, example="quire clones ls --store ./standby")
def list_clones(cli: Cli) -> Listing:
    """List the clones that this store keeps objects for."""
    root = os.path.abspath(cli.path)
    with cli.reader() as manifest, manifest.read() as txn, closing(open_place(txn, root, cli.settings())) as bucket:
        entries = registered.registrations(bucket, txn.store_id())
    rows = [ListingRow([entry.clone_id, moment(entry.at_ms), _created_at(entry)], entry) for entry in entries]
    return Listing(columns=["clone", "as of", "created at"], rows=rows, empty="no clones")


def _created_at(entry: registered.CloneRegistration) -> str:
    return f"{entry.host}:{entry.path}" + (" (takeover in progress)" if entry.is_takeover else "")


@command("release", clones, example="quire clones release --store ./copy")
def release(cli: Cli) -> Note:
    """Allow the parents of this clone to delete the objects they kept for it.

    Refused while the clone still reads objects of its parents.
    """
    released = cloning.release_clone(cli.path)
    text = f"{', '.join(released.parents)} no longer keeps objects for {released.store_id}"
    return Note(text=text, data=released)


@command("forget", clones, example="quire clones forget 1f0c0c1e-7d4e-4c5e-9f50-0d6d1c3b2a19 --store ./standby --yes")
def forget(
    cli: Cli,
    clone_id: Annotated[str, Argument(metavar="ID", help="The clone, as `quire clones ls` shows it.")],
    yes: Yes = False,
) -> Note:
    """Stop keeping objects for a clone, in its parent. A clone that still exists loses objects that it reads."""
    if not yes:
        confirm(f"stop keeping objects for {clone_id}?", "nothing was changed", {"forgotten": None})
    root = os.path.abspath(cli.path)
    with cli.reader() as manifest, manifest.read() as txn, closing(open_place(txn, root, cli.settings())) as bucket:
        store_id = txn.store_id()
        # by its name alone: a damaged registration must be removable
        if not any(key.endswith(f"/{clone_id}") for key in registered.clone_keys(bucket, store_id)):
            raise ObjectNotFound("no such clone", hint="`quire clones ls` lists them", clone_id=clone_id)
        registered.release(bucket, store_id, clone_id)
    return Note(text=f"objects are no longer kept for {clone_id}", data={"forgotten": clone_id})
