"""What the bearer of a token, or a caller without one, may do.

Terms
  grant      the rights of one caller; checked before a database is looked up, so that a refusal does not reveal what exists
  anonymous  a grant without a token: on loopback, where the settings allow it

Rules
  1. Administration (creating, forking and dropping databases, tokens, jobs) needs the admin token or the Unix socket.
  2. A database that a grant does not name is refused with the same error, whether it exists or not.
  3. An expired grant allows nothing, not even on a connection that was opened before.

Threads: any; values. Raises `Unauthenticated` (a token, or a new one, is needed) and `AccessDenied` (this one does not allow
it).
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
    """Access to a database; each level includes the ones below it."""

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
    """The source of the rights, for events and messages; never the token itself."""
    is_admin: bool = False
    everywhere: Access = Access.NONE
    """The access to every database, present and future."""
    databases: Mapping[str, Access] = field(default_factory=lambda: MappingProxyType({}))
    """The access to single databases, by name."""
    attachable: frozenset[str] = frozenset()
    """Databases that SQL on another one may attach, for reading. A token for the whole store may attach any it may read."""
    expires_ms: int | None = None
    is_anonymous: bool = False
    clock: Clock = field(default_factory=SystemClock, compare=False, repr=False)

    ADMIN: ClassVar[Grant]
    READ: ClassVar[Grant]
    NOTHING: ClassVar[Grant]

    @property
    def is_expired(self) -> bool:
        """Whether the grant has expired (rule 3)."""
        return self.expires_ms is not None and self.clock.now_ms() >= self.expires_ms

    def may(self, database: str, *, write: bool = False) -> bool:
        """Return whether a database may be read, or written."""
        access = max(self.everywhere, self.databases.get(database, Access.NONE))
        return not self.is_expired and access >= (Access.WRITE if write else Access.READ)

    def may_attach(self, database: str) -> bool:
        """Return whether SQL on another database may attach this one, for reading."""
        return self.may(database) and (self._attaches_all or database in self.attachable)

    def may_attach_all_of(self, other: Grant) -> bool:
        """Return whether SQL may attach every database that it may attach with another grant."""
        return self._attaches_all or (not other._attaches_all and other.attachable <= self.attachable)

    @property
    def _attaches_all(self) -> bool:
        # By identity: a signed token for every database, or a caller on loopback, has the same `everywhere` and must
        # not attach.
        return self is Grant.ADMIN or self is Grant.READ

    def check(self, database: str, *, write: bool = False) -> None:
        """Raise unless a database may be read, or written. `NAME@VERSION` is checked as `NAME`, for reading."""
        self._check_expiry()
        if not self.may(database, write=write):
            what = "written" if write and self.may(database) else "used"
            raise self._refused(
                f"this database may not be {what} with this token", "create one with `quire token create`"
            )

    def check_any_access(self) -> None:
        """Raise for an anonymous caller without any rights. For responses that show each caller what it may see."""
        self._check_expiry()
        if self.is_anonymous and self.everywhere is Access.NONE:
            raise self._refused("this needs a token", "create one with `quire token create`")

    def check_read_all(self) -> None:
        """Raise unless the whole store may be read: every database, metrics, the dashboard."""
        self._check_expiry()
        if self.everywhere < Access.READ:
            raise self._refused(
                "this needs a token for the whole store", "use the token in the store's read.token or admin.token"
            )

    def check_admin(self) -> None:
        """Raise unless the store may be administered (rule 1)."""
        self._check_expiry()
        if not self.is_admin:
            raise self._refused("this needs the admin token", "use the token in the store's admin.token")

    def _check_expiry(self) -> None:
        if self.is_expired:
            raise Unauthenticated("the token has expired", hint="create a new one with `quire token create`")

    def _refused(self, what: str, hint: str) -> QuireError:
        if self.is_anonymous:
            return Unauthenticated(what if self.everywhere else "this needs a token", hint=hint)
        return AccessDenied(what, hint=hint)


Grant.ADMIN = Grant(holder="admin", is_admin=True, everywhere=Access.WRITE)
Grant.READ = Grant(holder="read", everywhere=Access.READ)
Grant.NOTHING = Grant(holder="nobody", is_anonymous=True)
