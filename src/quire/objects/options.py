"""How to reach an object store: tunables and credentials, as plain data.

Rules
  1. Credentials come from the environment (AWS_*, GOOGLE_*, AZURE_*) unless `settings` has them; they are never part
     of a URL and never shown by `repr`.
  2. Options pickle: an executor opens its own store from (url, options).

Raises: `InvalidConfig`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from quire.core.errors import InvalidConfig
from quire.core.object_settings import ObjectSettings
from quire.core.settings import StoreSettings
from quire.objects.retry import RetryPolicy

FROM_ENVIRONMENT = "env:"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOptions:
    """What `open_store` needs beyond the URL. A path needs none of it.

    >>> StoreOptions(region="eu-central-1", settings={"secret_access_key": "s3cret"})  # doctest: +ELLIPSIS
    StoreOptions(endpoint=None, region='eu-central-1', allow_http=False, ...)
    """

    endpoint: str | None = None
    """Of an S3-compatible service, an emulator or a private endpoint; None means the provider's own."""
    region: str | None = None
    """S3 only. None means AWS_REGION, else us-east-1."""
    allow_http: bool = False
    """Plain HTTP is refused unless asked for: credentials and data would travel in the clear."""
    connect_timeout_seconds: float = 5.0
    request_timeout_seconds: float = 60.0
    """From connecting to the last byte of the body. 64 MiB in 60 s needs ~9 Mbit/s; raise it on slower links."""
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    settings: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Passed to the backend as they are: credentials, encryption … as in obstore's S3Config, GCSConfig, AzureConfig."""

    def __post_init__(self) -> None:
        if self.connect_timeout_seconds <= 0 or self.request_timeout_seconds <= 0:
            raise InvalidConfig("timeouts must be above zero seconds")
        for name in ("endpoint", "region", "bucket"):
            if name in self.settings:
                raise InvalidConfig(f"{name!r} belongs in the URL or in its own option, not in settings")


def options_of(settings: ObjectSettings, section: str) -> StoreOptions:
    """The options that a section of quire.toml stands for; variables that it names are read now."""
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
    """How the object store at `url` is reached: by the section of the namespace that is there, or by `[objects]`.

    `namespaces` are (URL, name). One without a section is reached like the store's own objects if both are of one kind, else
    by the environment.
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
    if (found := os.environ.get(variable)) is None:
        raise InvalidConfig(
            f"{setting} in quire.toml is the variable {variable}, which is not set",
            hint=f"set {variable} in the environment of this process, or change the setting",
        )
    return found
