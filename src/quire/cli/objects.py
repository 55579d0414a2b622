"""Commands about where a store's objects are and who may write them: takeover, objects moved.

Both open the store as its owner, which they are about: a live owner has to end first.
"""

from __future__ import annotations

from quire.cli.command import Cli, Verdict, agreed
from quire.cli.declarations import Group, command
from quire.cli.exit_codes import PROBLEMS
from quire.cli.formatting import count_of
from quire.cli.lookup import Yes
from quire.cli.output import Note


def add_to(app: Group) -> None:
    """Register these commands."""
    command(app, "takeover", example="quire takeover --store ./restored --yes")(takeover)
    group = Group("Manage where the store's objects are.")
    command(group, "moved", example="quire objects moved --yes")(moved)
    app.add("objects", group)


def takeover(cli: Cli, yes: Yes = False) -> Note | Verdict:
    """Make this directory the owner of its bucket.

    For a copy or a restored backup of a store. It begins a new owner epoch: new objects get names of their own. The previous
    owner, if it still runs, is fenced: it deletes nothing more, and puts nothing more after a minute. Nothing in the bucket is
    overwritten or removed.
    """
    if not yes:
        question = f"take over the objects of {cli.path}? Any other copy of the store that writes there is fenced."
        if not agreed(question, "nothing was taken over"):
            return Verdict(Note(text="nothing was taken over", data={"taken_over": False}), PROBLEMS)
    with cli.owner(takeover=True) as store:
        info = store.info()
    text = f"{info.path} owns {info.object_store} now, in owner epoch {info.owner_epoch}"
    return Note(
        text=text, data={"taken_over": True, "owner_epoch": info.owner_epoch, "object_store": info.object_store}
    )


def moved(cli: Cli, yes: Yes = False) -> Note | Verdict:
    """Accept that the objects were copied to where quire.toml says now.

    First copy all objects under their names, then edit `object_store`, then run this. It looks for some of the objects that the
    manifest knows, and changes nothing if one is missing.
    """
    if not yes and not agreed(
        f"have all objects been copied to {cli.settings().object_store or 'objects/'}?", "nothing was changed"
    ):
        return Verdict(Note(text="nothing was changed", data={"moved": False}), PROBLEMS)
    with cli.owner(moved=True) as store:
        looked, place = store.moved_objects, store.objects_url
    text = f"the objects are in {place} now; {count_of(looked, 'object')} checked, none missing"
    return Note(text=text, data={"moved": True, "object_store": place, "looked_for": looked})
