"""The only code that deletes objects (A3): engines and jobs have object stores without `delete`, and pass names to it.

An object is deleted only if its name is below a prefix that this store owns. Objects of *ancestors*, the earlier owner epochs,
are deleted only when this owner's session is confirmed: until then the previous owner, or the original of a copied directory,
may still need them. Objects of the *former* space, whose names have no store prefix because they are older than epochs, are
deleted only if this store has claimed that space. If a call contains one foreign name, nothing is deleted: the caller that
named it is wrong. The caller also decides how long an object is kept after its last use: the delete job (M8) and sweeps have
grace periods. With archiving on, archived moments may still need the object, and with clones, a clone may: `delete` retires
it, and `delete_now` is for objects that neither needs (A8, A12).

`withdraw` removes the registrations of standbys and clones: a standby removes its own, and a clone's is removed by the clone
or by an administrator who names it.

Threads: any. Raises: `ForeignObject`, what the confirmation raises, and what the object store raises.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

import msgspec

from quire.core.errors import ForeignObject
from quire.durable.names import parse_object_key
from quire.durable.object_names import is_log_key
from quire.objects.api import PAGE_OBJECTS, DeletableStore

Confirm = Callable[[], None]
"""Raises unless the bucket confirms that this process still owns the store."""
Retire = Callable[[str, list[str]], bool]
"""Records durably that objects at a URL are to be deleted when no archived moment and no clone needs them. Returns `False`, and
records nothing, if the store has neither."""


_REGISTRATION = re.compile(r"[0-9a-f-]{36}/(standby|clones)/[0-9a-f-]{36}")


class Owned(msgspec.Struct, frozen=True, kw_only=True):
    """The prefixes below which a store may delete, from its manifest."""

    current: frozenset[tuple[str, str]]
    """(URL, prefix) of the current owner epoch, for each location."""
    ancestors: frozenset[tuple[str, str]] = frozenset()
    former: frozenset[tuple[str, str]] = frozenset()
    """(URL, prefix) of the locations themselves: objects of older stores have no store id in their names."""
    foreign: frozenset[tuple[str, str]] = frozenset()
    """(URL, prefix) of the stores that this one was cloned from: it reads their objects and never deletes them (A12)."""


class Collector:
    """Deletes objects of one store after checking that the store owns them."""

    def __init__(
        self,
        open_store: Callable[[str], DeletableStore],
        owned: Callable[[], Owned],
        *,
        confirm: Confirm | None = None,
        claims_former: Callable[[], bool] = lambda: True,
        retire: Retire | None = None,
    ) -> None:
        """`confirm` is `None` where sessions are not confirmed: objects of ancestors are then kept. `retire` is `None` if the
        store can have neither an archive nor clones."""
        self._open_store = open_store
        self._owned = owned
        self._confirm = confirm
        self._claims_former = claims_former
        self._retire = retire
        self.before_delete: Callable[[str, list[str]], None] | None = None
        """Called with (URL, names) before a deletion; set by a backup that has yet to copy the objects. If it raises, nothing
        is deleted."""

    def delete(self, url: str, keys: Iterable[str]) -> None:
        """Delete objects that are no longer needed, or retire them. Missing objects are not errors. If it raises, some may be
        deleted and some not: call again."""
        names = self._checked(url, keys)
        if names and (self._retire is None or not self._retire(url, names)):
            self._remove(url, names)

    def delete_now(self, url: str, keys: Iterable[str]) -> None:
        """Delete objects that no archived moment needs, without retiring them."""
        self._remove(url, self._checked(url, keys))

    def delete_abandoned(self, url: str, prefix: str, keys: Iterable[str]) -> None:
        """Delete objects of an owner epoch that is not part of the store's history and that the administrator has named.

        `prefix` is that epoch's prefix; `ForeignObject` if it overlaps one of this store's.
        """
        owned, names = self._owned(), list(keys)
        ours = owned.current | owned.ancestors | owned.foreign
        if any(place == url and _overlap(prefix, space) for place, space in ours):
            what = "the owner epoch is part of this store's history"
            raise ForeignObject(what, hint="`quire archive abandoned` lists those that are not", store=url, key=prefix)
        if outside := [key for key in names if not key.startswith(f"{prefix}/")]:
            raise ForeignObject("the object belongs to another owner epoch", store=url, key=outside[0])
        if names and self._confirm is None:
            raise ForeignObject("it is not yet confirmed that this process owns the store", store=url, key=names[0])
        self._remove(url, names)

    def delete_registration(self, url: str, key: str) -> None:
        """Delete the registration of a takeover that has died."""
        _require_registration(url, key)
        self._remove(url, [key])

    def _checked(self, url: str, keys: Iterable[str]) -> list[str]:
        """Return the names to delete, without those of parents; raise if one may not be deleted."""
        names = list(keys)
        if not names:
            return names
        owned = self._owned()
        # Skipped, not refused: a clone's rows also name objects of its parents, which it never deletes (A12).
        names = [key for key in names if not _is_below(url, key, owned.foreign)]
        for key in names:
            if (refusal := self._refusal(url, key, owned)) is not None:
                raise refusal
        return names

    def _remove(self, url: str, names: list[str]) -> None:
        if not names:
            return
        if (rescue := self.before_delete) is not None:
            rescue(url, names)
        store = self._open_store(url)
        for start in range(0, len(names), PAGE_OBJECTS):
            if self._confirm is not None:
                self._confirm()  # for each batch: another owner may have taken over since the last one (A2)
            store.delete_many(names[start : start + PAGE_OBJECTS])

    def deletable(self, url: str, keys: Iterable[str]) -> set[str]:
        """Return the keys that `delete` would not refuse. A sweep also finds foreign names, which it only reports."""
        owned = self._owned()
        return {
            key for key in keys if self._refusal(url, key, owned) is None and not _is_below(url, key, owned.foreign)
        }

    def _refusal(self, url: str, key: str, owned: Owned) -> ForeignObject | None:
        """Return why a name may not be deleted: it is foreign, or not confirmed to be ours. `None` if it may be (A3)."""
        if _is_below(url, key, owned.current):
            return None
        if _is_below(url, key, owned.ancestors):
            if self._confirm is not None:
                return None
            what = "the object belongs to an earlier owner, which may still need it"
            hint = "it is deleted once this owner's session is confirmed; `quire takeover` fences the other owner"
        elif _is_former(url, key, owned.former):
            if self._claims_former():
                return None
            what = "the object's name has no store id, and another store has claimed such objects"
            hint = "remove it by hand if you are sure that it is not needed"
        else:
            what, hint = "the object does not belong to this store", "nothing was deleted; run `quire manifest check`"
        return ForeignObject(what, hint=hint, store=url, key=key)


def _is_below(url: str, key: str, spaces: frozenset[tuple[str, str]]) -> bool:
    return any(url == place and key.startswith(f"{prefix}/") for place, prefix in spaces)


def _overlap(one: str, other: str) -> bool:
    return f"{one}/".startswith(f"{other}/") or f"{other}/".startswith(f"{one}/")


def _is_former(url: str, key: str, spaces: frozenset[tuple[str, str]]) -> bool:
    suffixes = [key.removeprefix(f"{prefix}/") if prefix else key for place, prefix in spaces if place == url]
    return any(parse_object_key(suffix) is not None or is_log_key(suffix) for suffix in suffixes)


def withdraw(store: DeletableStore, key: str) -> None:
    """Delete the registration of a standby or a clone. A missing registration is not an error."""
    _require_registration(store.url, key)
    store.delete(key)


def _require_registration(url: str, key: str) -> None:
    if not _REGISTRATION.fullmatch(key):
        raise ForeignObject("this is not the registration of a standby or a clone", store=url, key=key)
