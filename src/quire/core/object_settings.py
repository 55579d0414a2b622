"""How object stores are reached: the sections `objects` and `namespaces.NAME` of quire.toml."""

from __future__ import annotations

import re

import msgspec

from quire.core.errors import InvalidConfig

ENDPOINT = re.compile(r"https?://[^\s/@?#]+(/[^\s?#]*)?")
"""A service's address. With others obstore fails at the first request, or panics."""


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise InvalidConfig(message, hint="docs/objects.md has examples")


class ObjectSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How an object store is reached. A directory needs none of it."""

    endpoint: str = ""
    """Of an S3-compatible service, an emulator or a private endpoint; empty: the provider's own."""
    region: str = ""
    """S3 only; empty: AWS_REGION, else us-east-1."""
    allow_http: bool = False
    """Whether an endpoint may be plain HTTP: credentials and data then travel in the clear."""
    connect_timeout_seconds: float = 5.0
    request_timeout_seconds: float = 60.0
    """How long a connection may take to be made, and a request with its answer."""
    credentials: dict[str, str] = {}
    """By obstore's names (`access_key_id`, `secret_access_key`, `account_name` …); a value `env:NAME` is that variable's.
    Empty: the provider's own variables (AWS_*, GOOGLE_*, AZURE_*)."""

    def check(self, section: str) -> None:
        """Refuse what cannot work, by the name of its section in quire.toml."""
        _require(
            self.connect_timeout_seconds > 0 and self.request_timeout_seconds > 0,
            f"{section}: timeouts must be above zero seconds",
        )
        if not self.endpoint:
            return
        _require(
            ENDPOINT.fullmatch(self.endpoint) is not None,
            f'{section}.endpoint is a URL such as "https://s3.example.com" or "http://127.0.0.1:9000"',
        )
        _require(
            self.allow_http or self.endpoint.startswith("https:"),
            f"{section}.endpoint is plain HTTP: set `allow_http = true` beside it if data may travel in the clear",
        )
