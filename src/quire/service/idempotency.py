"""Calls that are applied once, however often they are sent (M11).

Terms
  key      16 bytes the client makes up for a call and repeats with it
  effect   the operation by which a call takes effect; its batch carries the key, so key and effect commit together
  told     what is kept with the key: the ids that the effect gave, enough to answer again

The key is looked up before anything is done, and written by the very transaction that makes the change (`manifest/guard.py`):
no crash and no lost answer leaves one without the other. A call that fails leaves no key; it may be repeated, and is then done.
Of two equal calls at once the manifest's writer decides which is first, and the other gets the first one's answer. A key
belongs to its action: used for another one it is refused.

Threads: any.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from quire.core.errors import InvalidInput, QuireError
from quire.manifest import tables as t
from quire.manifest.guard import KeyedCall, keyed
from quire.manifest.ops.base import Op
from quire.manifest.store import ManifestStore

A = TypeVar("A")


class KeptAnswer(msgspec.Struct, frozen=True, array_like=True):
    """What is kept with a key."""

    action: str
    value: Any


def run_once(
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
    if (kept := _kept_answer(manifest, key, action)) is not None:
        return again(kept.value)
    call = KeyedCall(key, effects, lambda effect: msgspec.msgpack.encode(KeptAnswer(action, tell(effect))))
    with keyed(call):
        try:
            answer = do()
        except QuireError:
            if (kept := _kept_answer(manifest, key, action)) is None:
                raise
            return again(kept.value)
    if call.guard is not None and call.guard.repeated and (kept := _kept_answer(manifest, key, action)) is not None:
        return again(kept.value)
    return answer


def _kept_answer(manifest: ManifestStore, key: bytes, action: str) -> KeptAnswer | None:
    """What was kept with a key, while it is kept."""
    with manifest.read() as txn:
        row = txn.get(t.IDEMPOTENCY, key)
    if row is None or row.expires_at_ms <= manifest.clock.now_ms():
        return None
    try:
        kept = msgspec.msgpack.decode(row.result, type=KeptAnswer)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        kept = KeptAnswer("submit", None)  # the answer of a batch has no name of its own
    if kept.action != action:
        raise InvalidInput(
            "this idempotency key was used for another call", hint="a key belongs to one call", action=kept.action
        )
    return kept
