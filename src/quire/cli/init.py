"""The command `init`: creates a store."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import quire
from quire.cli.declarations import Argument, Option, command
from quire.cli.lookup import AllowHttp, Endpoint, Region, objects_given
from quire.cli.output import Note
from quire.core.errors import InvalidInput
from quire.core.settings import ObjectSettings, StoreSettings
from quire.durable.files import OsDisk
from quire.objects.open import open_store
from quire.objects.options import options_of
from quire.objects.urls import check_url
from quire.store.config_edit import change_config
from quire.store.layout import DirectoryState, directory_state, existing_config

if TYPE_CHECKING:
    from quire.cli.command import Cli


@command("init", example="quire init ./data")
def init(
    cli: Cli,
    path: Annotated[
        str,
        Argument(
            metavar="[PATH]", help="The directory; created if it does not exist.", show_default="default: --store"
        ),
    ] = "",
    object_store: Annotated[
        str,
        Option(
            metavar="URL",
            help="Location of the objects: a path, s3://…, gs://…, az://…",
            show_default="objects/ in the store",
        ),
    ] = "",
    endpoint: Endpoint = "",
    region: Region = "",
    allow_http: AllowHttp = False,
) -> Note:
    """Create a store, or check that one exists.

    Credentials of a bucket come from the environment (AWS_*, GOOGLE_*, AZURE_*) or from quire.toml, into which --endpoint,
    --region and --allow-http are written.
    """
    target = path or cli.path
    reached = objects_given(endpoint, region, allow_http)
    if object_store:
        check_url(object_store)
        if "://" not in object_store:  # in quire.toml a relative path is relative to the store
            object_store = os.path.abspath(object_store)
        # raises on a URL or options that cannot work, before anything is created
        open_store(object_store, options=options_of(reached, "objects")).close()
    exists = directory_state(OsDisk(), target) is DirectoryState.STORE
    if exists and (given_now := _new_settings(target, reached)):
        raise InvalidInput(
            f"the store exists, and has other settings: {given_now} cannot be set by `init`",
            hint="edit `[objects]` in its quire.toml",
            path=target,
        )
    settings = StoreSettings(object_store=object_store, objects=reached) if object_store else None
    with quire.open(target, "r" if exists else "rw", settings=settings) as store:
        if not exists:
            # allow_http comes before the endpoint, which may be plain HTTP
            given: dict[str, str | bool] = {"allow_http": allow_http, "endpoint": endpoint, "region": region}
            change_config(OsDisk(), store.path, {("objects", name): value for name, value in given.items() if value})
        text = f"{store.path} is already a store" if exists else f"created a store in {store.path}"
        return Note(text=text, data={"path": store.path, "created": not exists, "object_store": store.objects_url})


def _new_settings(path: str, wanted: ObjectSettings) -> str:
    """Return the options that differ from the quire.toml of an existing store, empty if none does."""
    kept = existing_config(OsDisk(), os.path.abspath(path)).objects
    names = ("endpoint", "region", "allow_http")
    changed = [name for name in names if getattr(wanted, name) not in ("", False, getattr(kept, name))]
    return ", ".join(f"`--{name.replace('_', '-')}`" for name in changed)
