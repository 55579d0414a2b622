"""Calls that are applied once, however often they are sent (M11).

Terms
  key      16 bytes that the client generates for a call and repeats with it
  effect   the operation by which a call takes effect; its batch carries the key, so key and effect commit together
  kept     the value kept with the key: the ids that the effect allocated, enough to answer again

The key is looked up first, and written by the transaction that makes the change (`manifest/guard.py`): no crash and no lost
response leaves one without the other. A call that fails leaves no key; it may be repeated, and is then executed. Of two equal
calls at the same time the manifest's writer decides which is first, and the other gets the first one's answer. A key belongs to
its action: it is refused for another one.

Threads: any.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from quire.core.decoding import UNDECODABLE, described
from quire.core.errors import InvalidInput, QuireError
from quire.manifest import tables as t
from quire.manifest.guard import KeyedCall, keyed
from quire.manifest.ops.base import Op
from quire.manifest.store import ManifestStore

A = TypeVar("A")


class KeptAnswer(msgspec.Struct, frozen=True, array_like=True):
    """The value kept with a key."""

    action: str
    value: Any


def run_once(
    manifest: ManifestStore,
    key: bytes,
    action: str,
    effects: tuple[type[Op], ...],
    kept_value_of: Callable[[Any], Any],
    do: Callable[[], A],
    replay: Callable[[Any], A],
) -> A:
    """Execute a call, or `replay` it from the value kept when it was executed. Without a key, only execute it."""
    if not key:
        return do()
    if (kept := _kept_answer(manifest, key, action)) is not None:
        return replay(kept.value)
    call = KeyedCall(key, effects, lambda effect: msgspec.msgpack.encode(KeptAnswer(action, kept_value_of(effect))))
    with keyed(call):
        try:
            answer = do()
        except QuireError:
            # An equal call may have committed since the first lookup. This one then fails because of what that one
            # did (the name is taken, say) and must return the same answer.
            if (kept := _kept_answer(manifest, key, action)) is None:
                raise
            return replay(kept.value)
    # The writer found the key of an equal call: `answer` describes an effect that was not committed.
    if call.guard is not None and call.guard.repeated and (kept := _kept_answer(manifest, key, action)) is not None:
        return replay(kept.value)
    return answer


def _kept_answer(manifest: ManifestStore, key: bytes, action: str) -> KeptAnswer | None:
    """Return the value kept with a key; `None` if there is none or it has expired."""
    with manifest.read() as txn:
        row = txn.get(t.IDEMPOTENCY, key)
    if row is None or row.expires_at_ms <= manifest.clock.now_ms():
        return None
    try:
        kept = msgspec.msgpack.decode(row.result, type=described(KeptAnswer))
    except UNDECODABLE:
        kept = KeptAnswer("submit", None)  # the kept answer of a batch has no action
    if kept.action != action:
        raise InvalidInput(
            "this idempotency key was used for another call", hint="use a new key for each call", action=kept.action
        )
    return kept
