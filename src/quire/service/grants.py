"""What the holder of a token, or whoever comes in without one, may do.

Terms
  grant      the rights of one caller; looked at before a database is looked up, so that a refusal tells nothing of what exists
  anonymous  a grant without a token: on loopback, where the settings allow it

Rules
  1. Administering (creating, forking and dropping databases, tokens, jobs) is the admin token's and the Unix socket's.
  2. A database that a grant does not name is refused in the same words, whether it exists or not.
  3. A grant that has expired allows nothing from that moment, also on a connection that was opened before.

Threads: any; values. Raises `Unauthenticated` (show a token, or a new one) and `AccessDenied` (this one does not allow it).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from types import MappingProxyType
from typing import ClassVar

from quire.core.clock import Clock, SystemClock
from quire.core.errors import AccessDenied, QuireError, Unauthenticated


class Access(IntEnum):
    """What may be done with a database; each level includes the ones below it."""

    NONE = 0
    READ = 1
    WRITE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """The rights of one caller.

    >>> grant = Grant(holder="jwt", databases={"shop": Access.READ})
    >>> grant.may("shop"), grant.may("shop", write=True), grant.may("other")
    (True, False, False)
    """

    holder: str
    """What gave the rights, for events and messages: never the token itself."""
    is_admin: bool = False
    everywhere: Access = Access.NONE
    """Of every database, now and in future."""
    databases: Mapping[str, Access] = field(default_factory=lambda: MappingProxyType({}))
    """Of single databases, by name."""
    attachable: frozenset[str] = frozenset()
    """Databases that SQL on another one may attach, for reading. With a token for the whole store: every one it may read."""
    expires_ms: int | None = None
    is_anonymous: bool = False
    clock: Clock = field(default_factory=SystemClock, compare=False, repr=False)

    ADMIN: ClassVar[Grant]
    READ: ClassVar[Grant]
    NOTHING: ClassVar[Grant]

    @property
    def is_expired(self) -> bool:
        """Whether its time is over (rule 3)."""
        return self.expires_ms is not None and self.clock.now_ms() >= self.expires_ms

    def may(self, database: str, *, write: bool = False) -> bool:
        """Whether a database may be read, or written."""
        access = max(self.everywhere, self.databases.get(database, Access.NONE))
        return not self.is_expired and access >= (Access.WRITE if write else Access.READ)

    def may_attach(self, database: str) -> bool:
        """Whether SQL on another database may attach this one, for reading."""
        return self.may(database) and (self is Grant.ADMIN or self is Grant.READ or database in self.attachable)

    def check(self, database: str, *, write: bool = False) -> None:
        """Refuse unless a database may be read, or written. `NAME@VERSION` is checked as `NAME`, for reading."""
        self._check_expiry()
        if not self.may(database, write=write):
            what = "written" if write and self.may(database) else "used"
            raise self._refused(
                f"this database may not be {what} with this token", "ask for one with `quire token create`"
            )

    def check_somebody(self) -> None:
        """Refuse whoever may nothing at all: for answers that show each caller what it may see."""
        self._check_expiry()
        if self.is_anonymous and self.everywhere is Access.NONE:
            raise self._refused("this needs a token", "ask for one with `quire token create`")

    def check_read_all(self) -> None:
        """Refuse unless the whole store may be looked at: every database, metrics, the dashboard."""
        self._check_expiry()
        if self.everywhere < Access.READ:
            raise self._refused("this needs a token for the whole store", "show the store's read.token or admin.token")

    def check_admin(self) -> None:
        """Refuse unless the store may be administered (rule 1)."""
        self._check_expiry()
        if not self.is_admin:
            raise self._refused("this needs the admin token", "show the token that is in the store's admin.token")

    def _check_expiry(self) -> None:
        if self.is_expired:
            raise Unauthenticated("the token has expired", hint="ask for a new one: `quire token create`")

    def _refused(self, what: str, hint: str) -> QuireError:
        if self.is_anonymous:
            return Unauthenticated(what if self.everywhere else "this needs a token", hint=hint)
        return AccessDenied(what, hint=hint)


Grant.ADMIN = Grant(holder="admin", is_admin=True, everywhere=Access.WRITE)
Grant.READ = Grant(holder="read", everywhere=Access.READ)
Grant.NOTHING = Grant(holder="nobody", is_anonymous=True)
