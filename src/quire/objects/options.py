"""Connection options and credentials of an object store, as plain data, and the only retry loop.

Credentials come from the environment (AWS_*, GOOGLE_*, AZURE_*) unless `settings` has them; they are never part of a URL and
never shown by `repr`. Options pickle: an executor opens its own store from (url, options).

Only `Transient` is retried, with exponential backoff and full jitter under one deadline: "not found", "exists" and "denied"
are final answers. obstore's own retries are off. Two loops would multiply attempts, and obstore would silently retry a
create-only put, so that our own object would look like another writer's (P11).

Threads: any. Raises: `InvalidConfig`, `ObjectStoreUnavailable`.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from quire.core.clock import Clock, SystemClock
from quire.core.errors import InvalidConfig, ObjectStoreUnavailable
from quire.core.events import emit_safely
from quire.core.settings import ObjectSettings, StoreSettings

T = TypeVar("T")

QUIET_SECONDS = 2.0
"""How long an operation is retried before an event reports it: somebody may be waiting, for up to a minute."""


class Transient(Exception):
    """An attempt failed in a way that may not recur. Used inside `objects/` only; it never leaves a `Retrier`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How long and how often to retry. The defaults survive a restart or a minute of throttling, not an outage."""

    attempts_max: int = 10
    deadline_seconds: float = 60.0
    backoff_first_seconds: float = 0.1
    backoff_max_seconds: float = 10.0

    def __post_init__(self) -> None:
        if self.attempts_max < 1:
            raise InvalidConfig(
                "attempts_max includes the first attempt and must be at least 1", value=self.attempts_max
            )
        if min(self.deadline_seconds, self.backoff_first_seconds, self.backoff_max_seconds) < 0:
            raise InvalidConfig("retry times may not be negative")

    def backoff_ceiling(self, attempt: int) -> float:
        """Return the longest pause, in seconds, after the `attempt`-th failure (1-based).

        >>> [RetryPolicy().backoff_ceiling(n) for n in (1, 2, 3, 20)]
        [0.1, 0.2, 0.4, 10.0]
        """
        # The exponent is capped because 2.0**1024 overflows; 2**64 first pauses exceed any ceiling anyway.
        return min(self.backoff_max_seconds, self.backoff_first_seconds * 2.0 ** min(attempt - 1, 64))


@dataclass(frozen=True, slots=True, kw_only=True)
class Retrier:
    """Runs operations under a policy. Clock, sleep and randomness are injected so that tests take no time."""

    policy: RetryPolicy = field(default_factory=RetryPolicy)
    clock: Clock = field(default_factory=SystemClock)
    sleep: Callable[[float], None] = time.sleep
    uniform: Callable[[float, float], float] = random.uniform

    def call(self, operation: Callable[[], T], *, doing: str, **where: object) -> T:
        """Run `operation` and return its result; retry it while it raises `Transient` and the policy allows."""
        policy, is_reported = self.policy, False
        started = self.clock.monotonic()
        attempt = 0
        while True:
            attempt += 1
            try:
                return operation()
            except Transient as failure:
                # Full jitter: clients that failed together must not retry together.
                pause = self.uniform(0.0, policy.backoff_ceiling(attempt))
                elapsed = self.clock.monotonic() - started
                if attempt >= policy.attempts_max or elapsed + pause > policy.deadline_seconds:
                    raise ObjectStoreUnavailable(
                        f"the object store kept failing while {doing}: {failure}",
                        hint=with_endpoint("check the network and the store's health, then try again", str(failure)),
                        **where,
                        attempts=attempt,
                        seconds=round(elapsed, 3),
                    ) from failure
                if elapsed >= QUIET_SECONDS and not is_reported:
                    is_reported = True
                    emit_safely("warning", "objects.retrying", doing=doing, error=str(failure), **where)
            self.sleep(pause)


AMAZON = ".amazonaws.com"


def with_endpoint(hint: str, text: str) -> str:
    """Return the hint for a failed request. One that went to Amazon may have been meant for another service."""
    if AMAZON not in text:
        return hint
    return f"{hint}; for another service than Amazon's, name it: `--endpoint URL`, or `endpoint` in [objects] of quire.toml"


FROM_ENVIRONMENT = "env:"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOptions:
    """What `open_store` needs in addition to the URL. Paths need none of it.

    >>> StoreOptions(region="eu-central-1", settings={"secret_access_key": "s3cret"})  # doctest: +ELLIPSIS
    StoreOptions(endpoint=None, region='eu-central-1', allow_http=False, ...)
    """

    endpoint: str | None = None
    """URL of an S3-compatible service, an emulator or a private endpoint; None means the provider's default."""
    region: str | None = None
    """S3 only. None means AWS_REGION, else us-east-1."""
    allow_http: bool = False
    """Whether plain HTTP is allowed. Off by default: credentials and data would travel in the clear."""
    connect_timeout_seconds: float = 5.0
    request_timeout_seconds: float = 60.0
    """From connecting to the last byte of the body. 64 MiB in 60 s needs ~9 Mbit/s; raise it on slower links."""
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    settings: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Passed to the backend unchanged: credentials, encryption … as in obstore's S3Config, GCSConfig, AzureConfig."""

    def __post_init__(self) -> None:
        if self.connect_timeout_seconds <= 0 or self.request_timeout_seconds <= 0:
            raise InvalidConfig("timeouts must be above zero seconds")
        for name in ("endpoint", "region", "bucket"):
            if name in self.settings:
                raise InvalidConfig(f"{name!r} belongs in the URL or in its own option, not in settings")


def options_of(settings: ObjectSettings, section: str) -> StoreOptions:
    """Return the options that a section of quire.toml describes. Environment variables that it names are read now."""
    return StoreOptions(
        endpoint=settings.endpoint or None,
        region=settings.region or None,
        allow_http=settings.allow_http,
        connect_timeout_seconds=settings.connect_timeout_seconds,
        request_timeout_seconds=settings.request_timeout_seconds,
        settings={
            name: _resolved(value, f"{section}.credentials.{name}") for name, value in settings.credentials.items()
        },
    )


def options_at(url: str, settings: StoreSettings, namespaces: Iterable[tuple[str, str]]) -> StoreOptions:
    """Return the options for the object store at `url`: those of its namespace's section, or those of `[objects]`.

    `namespaces` are (URL, name). A namespace without a section uses `[objects]` if its URL has the same scheme as the store's
    own; otherwise the environment alone applies.
    """
    for place, name in namespaces:
        if name and place == url and name in settings.namespaces:
            return options_of(settings.namespaces[name], f"namespaces.{name}")
    if _scheme(url) == _scheme(settings.object_store):
        return options_of(settings.objects, "objects")
    return StoreOptions()


def _scheme(url: str) -> str:
    return url.partition("://")[0].lower() if "://" in url else ""


def _resolved(value: str, setting: str) -> str:
    if not value.startswith(FROM_ENVIRONMENT):
        return value
    variable = value.removeprefix(FROM_ENVIRONMENT)
    if (resolved := os.environ.get(variable)) is None:
        raise InvalidConfig(
            f"{setting} in quire.toml refers to the variable {variable}, which is not set",
            hint=f"set {variable} in the environment of this process, or change the setting",
        )
    return resolved
