"""Says whether the object that a create-only put found is the chunk it wanted to put (P11).

A put whose answer was lost is repeated, and then finds its own object; or two attempts of one plan write the same chunk. Both
are the same artifact though their bytes may differ (another zstd, another level): identity decides. A plan burns its generation
(P10), so one name never belongs to two plans; if it does, nothing is overwritten and `put` raises `AlreadyExists`.

    store.put(key, data, create_only=True, identity=adopts(identity))

The row of an adopted object is made from `chunk_verify.describe`, never from what our own writer said.

Any thread; importable on executors (no lmdb). Format page: `docs/formats/chunk.md`.
Raises `Corruption` if the object that is there is damaged or no chunk at all, `FormatTooNew`, and what reading raises.
"""

from __future__ import annotations

from quire.objects.api import ExistingObject, Identity
from quire.pages.chunk_footer import load_footer
from quire.pages.chunk_format import ChunkIdentity, damaged


def identity_of(existing: ExistingObject) -> ChunkIdentity:
    """What the chunk that is there is, from its footer: one ranged read, two for a large one."""
    footer, _ = load_footer(existing.read, existing.info.size_bytes, name=existing.info.key)
    return footer.identity


def adopts(wanted: ChunkIdentity) -> Identity:
    """For `ObjectStore.put(…, identity=…)`: true for the same artifact made by the same plan."""

    def is_wanted(existing: ExistingObject) -> bool:
        found = identity_of(existing)
        if (found.key, found.plan_digest) != (wanted.key, wanted.plan_digest):
            return False
        if found != wanted:
            # One plan has one outcome; with the digest equal, something else is broken, and neither object is to be trusted.
            raise damaged("one plan made two different chunks", existing.info.key, found=found, expected=wanted)
        return True

    return is_wanted
