"""Why this user may not open a manifest: LMDB says "Permission denied", and not to what.

Reading needs more than a right to read. A reader leaves a mark in the lock file beside the manifest, by which the owner knows
which pages are still being looked at; without it (LMDB's `lock=False`) the owner would overwrite them under the reader's eyes.
On a file system that is mounted read-only there is no owner, and LMDB does without.
"""

from __future__ import annotations

import os

from quire.core.errors import NotWritable, QuireError, StorageFault

_READERS_TOO = "readers need it too: they leave a mark there, so that the owner keeps the pages they look at"


def denied(path: str, *, write: bool) -> QuireError | None:
    """The file or directory of the manifest at `path` that this user has too few rights to, and what to do about it."""
    folder, lock = os.path.dirname(path) or ".", f"{path}-lock"
    if not _may(folder, os.X_OK):
        return StorageFault("this user may not enter the manifest's directory", hint="`chmod +x` it", path=folder)
    if not os.path.exists(path):
        if not _may(folder, os.W_OK):
            return NotWritable("this user may not make a manifest here", hint="`chmod +w` the directory", path=folder)
    elif not _may(path, os.R_OK):
        return StorageFault("this user may not read the manifest", hint="`chmod +r` it", path=path)
    elif write and not _may(path, os.W_OK):
        return NotWritable(
            "this user may not write the manifest", hint='`chmod +w` it, or open with mode="r"', path=path
        )
    if not os.path.exists(lock):
        if not _may(folder, os.W_OK):
            hint = f"let the owner open the store once, or `chmod +w` the directory; {_READERS_TOO}"
            return NotWritable(
                "the manifest's lock file is missing, and this user may not make it", hint=hint, path=lock
            )
    elif not _may(lock, os.R_OK | os.W_OK):
        hint = f"`chmod +rw` this file for the user; {_READERS_TOO}"
        return NotWritable("this user may not write the manifest's lock file", hint=hint, path=lock)
    return None


def _may(path: str, mode: int) -> bool:
    return os.access(path, mode, effective_ids=True)
