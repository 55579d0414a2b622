"""Translates obstore's errors; no other module does.

`MEANINGS` has a line for every exception class that obstore defines; a test enumerates them. `translate` is total. Only
"no response", server errors and throttling are transient. A missing bucket is a configuration error, not a missing object: a
wrong URL must not look like an empty store.

obstore reports most failures as `GenericError` with the HTTP status only in its text, so the text is searched; tests with a
real server and a proxy verify this for each version.

Threads: any (pure functions). Raises: nothing.
"""

from __future__ import annotations

import errno
import os
import re
from enum import Enum, auto
from typing import Any

from obstore import exceptions as foreign

from quire.core.errors import AccessDenied, InvalidConfig, InvalidName, ObjectNotFound, QuireError, StorageFault
from quire.durable.files import too_many_open_files
from quire.objects.api import NameIsTaken
from quire.objects.options import Transient, with_endpoint


class ErrorMeaning(Enum):
    """The meaning of a class of obstore's errors."""

    NOT_FOUND = auto()
    TAKEN = auto()
    DENIED = auto()
    BAD_NAME = auto()
    BAD_CONFIG = auto()
    UNSUPPORTED = auto()
    UNEXPECTED = auto()
    TRANSIENT = auto()
    BY_STATUS = auto()
    """The class alone is ambiguous: the HTTP status in the text decides."""


MEANINGS: dict[type[Exception], ErrorMeaning] = {
    foreign.BaseError: ErrorMeaning.BY_STATUS,
    foreign.GenericError: ErrorMeaning.BY_STATUS,
    foreign.NotFoundError: ErrorMeaning.NOT_FOUND,
    foreign.AlreadyExistsError: ErrorMeaning.TAKEN,
    foreign.PreconditionError: ErrorMeaning.TAKEN,  # the only precondition we send is "if the name is free"
    foreign.NotModifiedError: ErrorMeaning.UNEXPECTED,  # we send no conditional reads
    foreign.PermissionDeniedError: ErrorMeaning.DENIED,
    foreign.UnauthenticatedError: ErrorMeaning.DENIED,
    foreign.InvalidPathError: ErrorMeaning.BAD_NAME,
    foreign.UnknownConfigurationKeyError: ErrorMeaning.BAD_CONFIG,
    foreign.NotSupportedError: ErrorMeaning.UNSUPPORTED,
    foreign.JoinError: ErrorMeaning.TRANSIENT,  # a task of obstore's own runtime died
    FileNotFoundError: ErrorMeaning.NOT_FOUND,
    ValueError: ErrorMeaning.BAD_NAME,
}
FOREIGN = tuple(MEANINGS)

_STATUS = re.compile(r"status code: (\d{3})")
_QUERY = re.compile(r"(https?://[^\s?\"]+)\?[^\s\"]*")
_XML = re.compile(r"<\?xml[^>]*>")
_S3_BODY = re.compile(r"<Error>.*?<Code>([^<]*)</Code>(?:.*?<Message>([^<]*)</Message>)?.*?(?:</Error>|$)", re.DOTALL)
"""The body of an error of S3; it also repeats the names of the request, and ids of it."""
TEXT_CHARACTERS_MAX = 500
_RETRYABLE_STATUSES = frozenset({408, 409, 425, 429})
_RETRYABLE_CODES = (
    "<Code>RequestTimeout<",
    "<Code>XAmzContentSHA256Mismatch<",
    "<Code>BadDigest<",
    "<Code>IncompleteBody<",
)
"""S3 answers these with 400 although the request was valid: the connection was slow or corrupted the data."""
_NO_BUCKET = ("NoSuchBucket", "bucket does not exist", "ContainerNotFound")
_NO_CREDENTIALS = ("169.254.169.254", "169.254.170.2", "metadata.google.internal")
"""The last places where backends look for credentials: if these fail, no credentials were configured."""
_LOST_UPLOAD = "<Code>NoSuchUpload<"
"""The response to completing a multipart upload was lost; obstore then tries to abort it and reports only that failure.
Uploading again replaces the object with an identical one."""
_BAD_RANGE = "Invalid range"
_NOT_FORMED = "builder error"
"""The request could not be built: plain HTTP without `allow_http`, or an endpoint that is not a URL."""
_ADDRESS = re.compile(r"[a-z]+://[^\s/]*")
ALLOW_HTTP = (
    "set `allow_http = true` in [objects] of quire.toml (or AWS_ALLOW_HTTP=true) if data may be sent unencrypted"
)
_NO_DESCRIPTOR = os.strerror(errno.EMFILE)
"""A connection needs a descriptor: retrying would only delay the error."""


def translate(error: Exception, *, doing: str, store: str, key: str | None) -> QuireError | Transient | NameIsTaken:
    """Translate an error of obstore. Total: every error has a translation."""
    meaning = next((MEANINGS[kind] for kind in type(error).__mro__ if kind in MEANINGS), ErrorMeaning.UNEXPECTED)
    full = str(error)
    text = readable(full)
    where: dict[str, Any] = {"store": store} if key is None else {"store": store, "key": key}
    if _NO_DESCRIPTOR in full:
        return too_many_open_files(doing, **where)
    if meaning in (ErrorMeaning.BY_STATUS, ErrorMeaning.NOT_FOUND):
        meaning = _classify_by_status(full, meaning)
    match meaning:
        case ErrorMeaning.NOT_FOUND:
            return ObjectNotFound("the object store has no object with this name", **where)
        case ErrorMeaning.TAKEN:
            return NameIsTaken(text)
        case ErrorMeaning.DENIED if any(sign in full for sign in _NO_CREDENTIALS):
            return AccessDenied(
                "no credentials were found for the object store",
                hint="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (S3; docs/objects.md has the others), or `credentials` "
                "in [objects] of quire.toml",
                **where,
                cause=text,
            )
        case ErrorMeaning.DENIED:
            return AccessDenied(
                f"the object store rejected the credentials while {doing}: {text}",
                hint=with_endpoint(
                    "check the credentials in the environment or in quire.toml, and their permissions", full
                ),
                **where,
            )
        case ErrorMeaning.BAD_NAME:
            return InvalidName(f"the object store rejected the name: {text}", **where)
        case ErrorMeaning.BAD_CONFIG:
            return _misconfigured(text, where)
        case ErrorMeaning.UNSUPPORTED:
            return StorageFault(f"the object store does not support this ({doing}): {text}", **where)
        case ErrorMeaning.TRANSIENT:
            return Transient(text)
    return StorageFault(f"the object store returned an unexpected response while {doing}: {text}", **where)


def readable(text: str) -> str:
    """Return obstore's message as one line, without the dump that obstore appends and without query strings.

    >>> readable(
    ...     "Error performing GET https://a.blob/x?sig=s3cret in 3ms - 404: <?xml version='1.0'?>\\n<Code>No</Code>"
    ... )
    'Error performing GET https://a.blob/x?… in 3ms - 404: <Code>No</Code>'
    """
    text = _XML.sub("", text.partition("\n\nDebug source")[0])
    text = _S3_BODY.sub(lambda body: ": ".join(filter(None, body.groups())), text)
    return " ".join(_QUERY.sub(r"\1?…", text).split())[:TEXT_CHARACTERS_MAX]


def _misconfigured(text: str, where: dict[str, Any]) -> InvalidConfig:
    """Describe the configuration error and name the setting to change; obstore's own message names neither."""
    if _NOT_FORMED in text:
        address = match[0] if (match := _ADDRESS.search(text)) else ""
        if address.startswith("http:"):
            return InvalidConfig(
                f"the endpoint {address} is plain HTTP, which is not allowed",
                hint=f"{ALLOW_HTTP}, or use an https:// endpoint",
                **where,
            )
        return InvalidConfig(
            f"no request can be made to the endpoint {address}".rstrip(),
            hint="set `endpoint` in [objects] of quire.toml to a URL such as https://s3.example.com",
            **where,
        )
    if any(sign in text for sign in _NO_BUCKET):
        return InvalidConfig(
            f"the bucket does not exist: {text}",
            hint=with_endpoint("create it, or correct its URL (`object_store` in quire.toml)", text),
            **where,
        )
    if match := _STATUS.search(text):
        return InvalidConfig(
            f"the object store returned a redirect ({match[1]}): the bucket is in another region or elsewhere",
            hint="set `region` or `endpoint` in [objects] of quire.toml",
            **where,
        )
    hint = "compare `credentials` in [objects] of quire.toml with obstore's names"
    return InvalidConfig(f"unknown setting of the object store: {text}", hint=hint, **where)


def _classify_by_status(text: str, otherwise: ErrorMeaning) -> ErrorMeaning:
    """Classify by the HTTP status and the error code in the body. No status means that no response arrived: transient."""
    if any(sign in text for sign in _NO_BUCKET):
        return ErrorMeaning.BAD_CONFIG
    if _LOST_UPLOAD in text:
        return ErrorMeaning.TRANSIENT
    if otherwise is ErrorMeaning.NOT_FOUND:
        return otherwise
    status_text = _STATUS.search(text)
    if any(sign in text for sign in _NO_CREDENTIALS):
        return ErrorMeaning.DENIED
    if status_text is None:
        return ErrorMeaning.BAD_CONFIG if _NOT_FORMED in text else ErrorMeaning.TRANSIENT
    status = int(status_text[1])
    if status >= 500 or status in _RETRYABLE_STATUSES or any(code in text for code in _RETRYABLE_CODES):
        return ErrorMeaning.TRANSIENT
    if status in (401, 403):
        return ErrorMeaning.DENIED
    if 300 <= status < 400:
        return ErrorMeaning.BAD_CONFIG  # the bucket is in another region
    return ErrorMeaning.UNEXPECTED


def is_past_the_end(error: Exception) -> bool:
    """Return whether a ranged read failed because the object ends before the range begins."""
    text = str(error)
    status_text = _STATUS.search(text)
    return _BAD_RANGE in text or (status_text is not None and status_text[1] == "416")
