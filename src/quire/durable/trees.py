"""Whole directories that go."""

from __future__ import annotations

import os
from contextlib import suppress

from quire.core.errors import StorageFault
from quire.durable.files import Disk


def remove_tree(disk: Disk, path: str) -> None:
    """Remove a file or a directory with what is in it; one that is gone is fine.

    Asking the kernel first keeps us from following a link out.
    """
    with suppress(FileNotFoundError):
        try:
            disk.remove(path)
        except StorageFault as fault:
            if fault.where.get("errno") not in ("EISDIR", "EPERM"):
                raise
            for name in disk.names(path):
                remove_tree(disk, os.path.join(path, name))
            disk.remove_dir(path)
