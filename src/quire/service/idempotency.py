"""Calls that are applied once, however often they are sent (M11).

Terms
  key      16 bytes the client makes up for a call and repeats with it
  effect   the operation by which a call takes effect; its batch carries the key, so key and effect commit together
  told     what is kept with the key: the ids that the effect gave, enough to answer again

Rules
  1. The key is looked for before anything is done; it is written by the very transaction that makes the change. So there is no
     moment at which a crash, or a lost answer, could leave one without the other.
  2. A call that fails leaves no key: it may be repeated, and is then done.
  3. Two of the same call at once: the manifest's writer decides which is first, the other gets the first one's answer.
  4. A key belongs to its action: used for another one it is refused, not answered with something else.

How the key gets to the batch: a store's methods build their own batches, so `manifest.submit` is replaced once by a
`KeyedSubmit`, which adds the key of the call that the current thread is doing. Calls of other threads pass through.

Threads: any.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from quire.core.errors import InvalidInput, QuireError
from quire.manifest import tables as t
from quire.manifest.guard import ManifestGuard
from quire.manifest.ops.base import Op
from quire.manifest.store import ManifestStore

A = TypeVar("A")


class Told(msgspec.Struct, frozen=True, array_like=True):
    """What is kept with a key."""

    action: str
    value: Any


@dataclass(slots=True, eq=False)
class Use:
    """The call that a thread is doing."""

    key: bytes
    action: str
    effects: tuple[type[Op], ...]
    tell: Callable[[Any], Any]
    guard: ManifestGuard | None = None

    @property
    def repeated(self) -> bool:
        return self.guard is not None and self.guard.repeated


class _Current(threading.local):
    use: Use | None = None


_current = _Current()


class KeyedSubmit:
    """`manifest.submit`, with the key of the current call where its effect is."""

    def __init__(self, submit: Callable[..., ManifestGuard]) -> None:
        self._submit = submit

    def __call__(
        self, ops: Iterable[Op], *, key: bytes | None = None, result: bytes = b"", timeout: float | None = None
    ) -> ManifestGuard:
        use = _current.use
        if use is None or key is not None:
            return self._submit(ops, key=key, result=result, timeout=timeout)
        batch = tuple(ops)
        effect = next((op for op in batch if isinstance(op, use.effects)), None)
        if effect is None:
            return self._submit(batch, timeout=timeout)
        told = msgspec.msgpack.encode(Told(use.action, use.tell(effect)))
        use.guard = self._submit(batch, key=use.key, result=told, timeout=timeout)
        return use.guard


def prepare(manifest: ManifestStore) -> None:
    """Make a manifest ready for `once`; a second time: nothing."""
    if not isinstance(manifest.submit, KeyedSubmit):
        manifest.submit = KeyedSubmit(manifest.submit)


def once(
    manifest: ManifestStore,
    key: bytes,
    action: str,
    effects: tuple[type[Op], ...],
    tell: Callable[[Any], Any],
    do: Callable[[], A],
    again: Callable[[Any], A],
) -> A:
    """Do a call, or answer it `again` from what was told when it was done. Without a key it is just done."""
    if not key:
        return do()
    if (told := _told(manifest, key, action)) is not None:
        return again(told.value)
    with _using(Use(key, action, effects, tell)) as use:
        try:
            answer = do()
        except QuireError:
            if (told := _told(manifest, key, action)) is None:
                raise
            return again(told.value)
    if use.repeated and (told := _told(manifest, key, action)) is not None:
        return again(told.value)
    return answer


@contextmanager
def _using(use: Use) -> Iterator[Use]:
    _current.use = use
    try:
        yield use
    finally:
        _current.use = None


def _told(manifest: ManifestStore, key: bytes, action: str) -> Told | None:
    """What was kept with a key, while it is kept (rule 4)."""
    with manifest.read() as txn:
        row = txn.get(t.IDEMPOTENCY, key)
    if row is None or row.expires_at_ms <= manifest.clock.now_ms():
        return None
    try:
        told = msgspec.msgpack.decode(row.result, type=Told)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        told = Told("submit", None)  # the answer of a batch has no name of its own
    if told.action != action:
        raise InvalidInput(
            "this idempotency key was used for another call", hint="a key belongs to one call", action=told.action
        )
    return told
