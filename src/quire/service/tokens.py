"""Tokens, which authenticate clients that do not connect through the Unix socket.

Rules
  1. A token is in a file that only its owner may read. A file that others may read is refused: anyone may know its token.
  2. Tokens are compared in constant time, and never logged, printed or put into an error, an option or a plan (K6).
  3. There is one token for reading and one for everything. They must differ; otherwise the read token would grant everything.

Threads: any; pure functions over files. Raises `InvalidConfig`, and what the disk raises.
"""

from __future__ import annotations

import hmac
import os
import secrets
import stat
from contextlib import suppress
from dataclasses import dataclass

from quire.core.errors import InvalidConfig
from quire.durable import names
from quire.durable.files import translated
from quire.service.grants import Grant

TOKEN_BYTES_MIN = 16
TOKEN_BYTES_MAX = 16 * 1024
"""The limit of a signed token: a few hundred database names fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """Files that a server on the network needs. An empty path of a token means the file in the store."""

    admin_token_file: str = ""
    read_token_file: str = ""
    tls_cert_file: str = ""
    tls_key_file: str = ""


def ensure_token(path: str) -> str:
    """Return the token in a file, which is created with a new token if it does not exist."""
    token = secrets.token_urlsafe(32)
    return token if make_private(path, token.encode() + b"\n") else read_token(path)


def read_token(path: str) -> str:
    """Return the token in a file (rule 1)."""
    text = read_private(path, TOKEN_BYTES_MAX + 1).strip()
    if not TOKEN_BYTES_MIN <= len(text) <= TOKEN_BYTES_MAX or not text.isascii() or not text.decode().isprintable():
        raise InvalidConfig(
            "a token must be one line of at least 16 printable characters",
            hint="remove the file: a new one is created",
            path=path,
        )
    return text.decode()


def make_private(path: str, contents: bytes) -> bool:
    """Create a file that only its owner may read; return False if it exists."""
    temporary = f"{path}.{os.getpid()}{names.TEMPORARY}"
    with translated(path, "creating a token file"), suppress(FileNotFoundError):
        os.unlink(temporary)  # left by a process that was killed at this point
    with translated(path, "creating a token file"):
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(contents)
            os.link(temporary, path)  # atomic: another process may be about to read the file
        except FileExistsError:
            return False
        finally:
            os.unlink(temporary)
    return True


def read_private(path: str, bytes_max: int) -> bytes:
    """Return the contents of a file that only its owner may read (rule 1)."""
    try:
        with translated(path, "reading a token file"):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise InvalidConfig(
            "the token file does not exist", hint="start the owner's server, which creates it", path=path
        ) from None
    with os.fdopen(fd, "rb") as file:
        if stat.S_IMODE(os.fstat(fd).st_mode) & 0o077:
            raise InvalidConfig("other users can read the token file", hint=f"`chmod 600 {path}`", path=path)
        return file.read(bytes_max)


def bearer(header: str) -> str:
    """Return the token of a header `authorization: Bearer …`; empty if it has none."""
    scheme, _, token = header.partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens that a server accepts. `None`: there is no such token."""

    admin: str | None = None
    read: str | None = None

    def __post_init__(self) -> None:
        if self.admin is not None and self.admin == self.read:
            raise InvalidConfig(
                "the tokens for reading and for full access are the same", hint="give each its own file"
            )

    def grant(self, token: str) -> Grant | None:
        """Return what a token allows; `None`: nothing. Both tokens are always compared (rule 2)."""
        given = token.encode(errors="replace")
        is_admin = self.admin is not None and hmac.compare_digest(given, self.admin.encode())
        is_read = self.read is not None and hmac.compare_digest(given, self.read.encode())
        return Grant.ADMIN if is_admin else Grant.READ if is_read else None
