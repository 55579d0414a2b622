"""Opens an object store by its URL.

A URL holds no credentials, no query and no fragment; it can be logged and stored. A URL that cannot work is refused here, with
a hint that lists what is allowed; opening contacts no server and creates nothing. Opening a path does not import obstore: light
commands stay light, and executors that only read a shared directory need no cloud client.

Threads: any. Raises: `InvalidConfig`, `InvalidName`.
"""

from __future__ import annotations

import os
import re
from urllib.parse import unquote, urlsplit

from quire.core.clock import Clock
from quire.core.errors import InvalidConfig
from quire.durable.files import Disk, OsDisk
from quire.objects.api import DeletableStore, check_prefix
from quire.objects.local import LocalStore
from quire.objects.options import Retrier, StoreOptions
from quire.objects.urls import ALLOWED, REMOTE_SCHEMES

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


def open_store(
    url: str | os.PathLike[str],
    *,
    options: StoreOptions | None = None,
    disk: Disk | None = None,
    clock: Clock | None = None,
    retrier: Retrier | None = None,
) -> DeletableStore:
    """Open the object store at `url`: a path, `file://`, `s3://`, `gs://`, `az://` or `memory://`.

    `disk` and `clock` are used for paths only. `retrier` replaces the one made from `options.retry`; tests pass one to control
    clock, sleep and randomness.

    >>> store = open_store("memory://")
    >>> store.put("a/b", b"hello").size_bytes
    5
    >>> store.get_range("a/b", 1, 3)
    b'ell'
    >>> open_store("ftp://host/x")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    quire.core.errors.InvalidConfig: no object store has the scheme 'ftp' (url='ftp://host/x'); use a path, file:///path, ...
    """
    url = os.fspath(url)
    if not url:
        raise InvalidConfig("the URL of an object store may not be empty", hint=f"use {ALLOWED}")
    scheme_match = _SCHEME.match(url)
    if scheme_match is None:
        return LocalStore(url, disk=disk or OsDisk(), clock=clock)
    scheme = scheme_match[1].lower()
    parts = urlsplit(url)
    if "@" in parts.netloc:
        # The message omits the URL: the part before the '@' is probably a secret.
        raise InvalidConfig(
            "the URL of an object store may not hold credentials",
            hint="set them in the environment, or in `credentials` of [objects] in quire.toml",
        )
    if scheme == "file":
        if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
            raise InvalidConfig("a file URL needs three slashes and an absolute path", hint="use file:///path", url=url)
        return LocalStore(unquote(parts.path), disk=disk or OsDisk(), clock=clock)
    if scheme not in REMOTE_SCHEMES:
        raise InvalidConfig(f"no object store has the scheme {scheme!r}", hint=f"use {ALLOWED}", url=url)
    if parts.query or parts.fragment:
        raise InvalidConfig(
            "the URL of an object store may not have '?' or '#'", hint="pass options in StoreOptions", url=url
        )
    if not parts.netloc and scheme != "memory":
        raise InvalidConfig("the URL names no bucket", hint=f"use {ALLOWED}", url=url)
    prefix = check_prefix(parts.path.removeprefix("/"))
    options = options or StoreOptions()

    from quire.objects.remote import open_remote  # loads obstore

    return open_remote(scheme, parts.netloc, prefix, options, retrier or Retrier(policy=options.retry))
