"""Tokens: what clients show who do not come through the Unix socket.

Rules
  1. A token lives in a file that only its owner may read; one that others may read is refused, as it may be known to anybody.
  2. Tokens are compared in constant time, and never logged, printed or put into an error, an option or a plan (K6).
  3. There is one for reading and one for everything; they differ, or the one for reading would give more than it says.

Pure functions over files, any thread. Raises `InvalidConfig`, and what the disk raises.
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
"""Of a signed token: some hundred names of databases fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """What a server on the network needs; empty paths of tokens mean the files in the store."""

    admin_token_file: str = ""
    read_token_file: str = ""
    tls_cert_file: str = ""
    tls_key_file: str = ""


def ensure_token(path: str) -> str:
    """The token in a file, which is made with a new one if it is not there."""
    token = secrets.token_urlsafe(32)
    return token if make_private(path, token.encode() + b"\n") else read_token(path)


def read_token(path: str) -> str:
    """The token in a file (rule 1)."""
    text = read_private(path, TOKEN_BYTES_MAX + 1).strip()
    if not TOKEN_BYTES_MIN <= len(text) <= TOKEN_BYTES_MAX or not text.isascii() or not text.decode().isprintable():
        raise InvalidConfig(
            "a token is one line of at least 16 printable characters",
            hint="remove the file: a new one is created",
            path=path,
        )
    return text.decode()


def make_private(path: str, contents: bytes) -> bool:
    """Make a file that only its owner may read; whether it was not there before."""
    temporary = f"{path}.{os.getpid()}{names.TEMPORARY}"
    with translated(path, "making a token file"), suppress(FileNotFoundError):
        os.unlink(temporary)  # of a process that was killed here
    with translated(path, "making a token file"):
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(contents)
            os.link(temporary, path)  # whole or not at all: another process may be about to read it
        except FileExistsError:
            return False
        finally:
            os.unlink(temporary)
    return True


def read_private(path: str, bytes_max: int) -> bytes:
    """What is in a file that only its owner may read (rule 1)."""
    try:
        with translated(path, "reading a token file"):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise InvalidConfig("the token file does not exist", hint="the owner's server makes it", path=path) from None
    with os.fdopen(fd, "rb") as file:
        if stat.S_IMODE(os.fstat(fd).st_mode) & 0o077:
            raise InvalidConfig("others may read the token file", hint=f"chmod 600 {path}", path=path)
        return file.read(bytes_max)


def bearer(header: str) -> str:
    """The token in a header `authorization: Bearer …`; empty if it has none."""
    scheme, _, token = header.partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


@dataclass(frozen=True, slots=True)
class Tokens:
    """What a server accepts; `None`: nobody is admitted that way."""

    admin: str | None = None
    read: str | None = None

    def __post_init__(self) -> None:
        if self.admin is not None and self.admin == self.read:
            raise InvalidConfig("the tokens for reading and for everything are the same", hint="give each its own file")

    def grant(self, token: str) -> Grant | None:
        """What a token allows; `None`: nothing. Both are always compared (rule 2)."""
        given = token.encode(errors="replace")
        is_admin = self.admin is not None and hmac.compare_digest(given, self.admin.encode())
        is_read = self.read is not None and hmac.compare_digest(given, self.read.encode())
        return Grant.ADMIN if is_admin else Grant.READ if is_read else None
