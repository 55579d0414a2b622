"""Deletes objects, as the only one who does (A3): engines and jobs have object stores without `delete`, and hand names to it.

A name goes only if it is below a prefix that this store owns. Those of its ancestors, the owner epochs before, go when this
owner's session is confirmed: until then the owner before it, or the original of a copied directory, may still need them. Those
of the former space, of a store older than epochs and without a prefix, go if it is claimed. One foreign name, and nothing of
the call is deleted: what named it is wrong. How long an object is kept after nothing needs it is decided by who asks: the
grace of the delete job (M8), and of a sweep. With archiving on, archived moments still need it: `delete` retires it, and
`delete_now` is for whoever knows that none does (A8).

What standbys and clones have put to make themselves known is removed by `withdraw`: a standby's entry is the standby's own, and
a clone's entry is removed by the clone, or by a person who names it.

Threads: any. Raises `ForeignObject`, what the confirmation raises, and what the object store raises.
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
"""Raises unless this process is still the store's owner, by the bucket's word."""
Retire = Callable[[str, list[str]], None]
"""Takes down that objects at a URL are to be deleted when no archived moment needs them; durable on return."""


_REGISTRATION = re.compile(r"[0-9a-f-]{36}/(standby|clones)/[0-9a-f-]{36}")


class Owned(msgspec.Struct, frozen=True, kw_only=True):
    """What a store may delete, as its manifest says."""

    current: frozenset[tuple[str, str]]
    """(URL, prefix) of the current owner epoch, in each place."""
    ancestors: frozenset[tuple[str, str]] = frozenset()
    former: frozenset[tuple[str, str]] = frozenset()
    """(URL, prefix) of places themselves: what older stores have put there is below no store's name."""
    foreign: frozenset[tuple[str, str]] = frozenset()
    """(URL, prefix) of stores that this one is a clone of: it reads there, and lets go without deleting (A12)."""


class Collector:
    """Deletes objects of one store, after looking whose they are."""

    def __init__(
        self,
        open_store: Callable[[str], DeletableStore],
        owned: Callable[[], Owned],
        *,
        confirm: Confirm | None = None,
        claims_former: Callable[[], bool] = lambda: True,
        retire: Retire | None = None,
    ) -> None:
        """`confirm` is `None` where nobody confirms sessions: then what ancestors wrote is kept. `retire` is `None` without
        archiving."""
        self._open_store = open_store
        self._owned = owned
        self._confirm = confirm
        self._claims_former = claims_former
        self._retire = retire
        self.before_delete: Callable[[str, list[str]], None] | None = None
        """Given (URL, names) before they are deleted, by a backup that has yet to copy them; if it raises, they stay."""

    def delete(self, url: str, keys: Iterable[str]) -> None:
        """Remove objects that nothing needs now, or retire them; missing ones are fine. If it raises, some may be gone and some
        not: call again."""
        names = self._checked(url, keys)
        if self._retire is None:
            self._remove(url, names)
        elif names:
            self._retire(url, names)

    def delete_now(self, url: str, keys: Iterable[str]) -> None:
        """The same for objects that no archived moment needs."""
        self._remove(url, self._checked(url, keys))

    def delete_abandoned(self, url: str, prefix: str, keys: Iterable[str]) -> None:
        """Remove objects of an owner epoch that the store's history does not contain: a person has named it. `prefix` is that
        epoch's; it may be none of ours."""
        owned, names = self._owned(), list(keys)
        ours = owned.current | owned.ancestors | owned.foreign
        if any(place == url and _overlap(prefix, space) for place, space in ours):
            what = "the owner epoch is part of this store's history"
            raise ForeignObject(what, hint="`quire archive abandoned` lists those that are not", store=url, key=prefix)
        if outside := [key for key in names if not key.startswith(f"{prefix}/")]:
            raise ForeignObject("the object is of another owner epoch", store=url, key=outside[0])
        if names and self._confirm is None:
            raise ForeignObject("it is not confirmed that this process owns the store", store=url, key=names[0])
        self._remove(url, names)

    def _checked(self, url: str, keys: Iterable[str]) -> list[str]:
        """The names, if all of them may go."""
        names = list(keys)
        if not names:
            return names
        owned = self._owned()
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
                self._confirm()
            store.delete_many(names[start : start + PAGE_OBJECTS])

    def deletable(self, url: str, keys: Iterable[str]) -> set[str]:
        """Those that `delete` would not refuse: a sweep meets names that are somebody else's, and only reports them."""
        owned = self._owned()
        return {
            key for key in keys if self._refusal(url, key, owned) is None and not _is_below(url, key, owned.foreign)
        }

    def _refusal(self, url: str, key: str, owned: Owned) -> ForeignObject | None:
        """Why a name may not be deleted, being another store's or not confirmed to be ours; `None` if it may go (rule
        1)."""
        if _is_below(url, key, owned.current):
            return None
        if _is_below(url, key, owned.ancestors):
            if self._confirm is not None:
                return None
            what = "the object is an earlier owner's, who may still need it"
            hint = "it is deleted once this owner's session is confirmed; `quire takeover` deposes the other one"
        elif _is_former(url, key, owned.former):
            if self._claims_former():
                return None
            what = "the object has no store's name, and another store has claimed those"
            hint = "remove it by hand if you know that it is not needed"
        else:
            what, hint = "the object is not this store's", "nothing was deleted; run `quire manifest check`"
        return ForeignObject(what, hint=hint, store=url, key=key)


def _is_below(url: str, key: str, spaces: frozenset[tuple[str, str]]) -> bool:
    return any(url == place and key.startswith(f"{prefix}/") for place, prefix in spaces)


def _overlap(one: str, other: str) -> bool:
    return f"{one}/".startswith(f"{other}/") or f"{other}/".startswith(f"{one}/")


def _is_former(url: str, key: str, spaces: frozenset[tuple[str, str]]) -> bool:
    suffixes = [key.removeprefix(f"{prefix}/") if prefix else key for place, prefix in spaces if place == url]
    return any(parse_object_key(suffix) is not None or is_log_key(suffix) for suffix in suffixes)


def withdraw(store: DeletableStore, key: str) -> None:
    """Remove a registration; one that is missing is fine."""
    if not _REGISTRATION.fullmatch(key):
        raise ForeignObject("this is no registration of a standby or a clone", store=store.url, key=key)
    store.delete(key)
