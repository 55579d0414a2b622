"""Puts into a wheel what is made for it: the parts in C (`LIBRARIES`, in `src/quire/sqlite`), and the man pages.

The parts in C need a C compiler (`CC`, or `cc`), and that of the VFS SQLite's header `sqlite3ext.h`. With neither of them, or
with `QUIRE_PURE=1`, the wheel is the pure one; `quire doctor` says which were built.

Man pages are taken from the directory that `QUIRE_MAN` names, as `make dist` does it: making them needs all that quire needs,
which is not there where a wheel is built. They are installed in `share/man/man1` of the environment.

Nothing here makes an install fail.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCES = "src/quire/sqlite"
LIBRARIES = {"vfs_shim.c": "libquirevfs.so", "leaf_columns.c": "libquireleaves.so"}
COMPILER_SECONDS = 120


class ShimHook(BuildHookInterface):
    """Called by hatchling for each wheel, and for an editable install, which is a wheel to it."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build the libraries, and put them into the wheel; of an editable install, beside their sources."""
        sources = Path(self.root, SOURCES)
        if version == "editable":
            for name, library in LIBRARIES.items():
                target = sources / library
                target.unlink(missing_ok=True)  # of another version, or of another machine
                self._build(sources / name, target)
            return
        man = os.environ.get("QUIRE_MAN", "")
        for page in sorted(Path(self.root, man).glob("*.1")) if man else ():
            build_data["shared_data"][str(page)] = f"share/man/man1/{page.name}"
        self._scratch = tempfile.TemporaryDirectory(prefix="quire-build-")
        for name, library in LIBRARIES.items():
            target = Path(self._scratch.name, library)
            if not self._build(sources / name, target):
                continue
            build_data["force_include"][str(target)] = f"quire/sqlite/{library}"
            build_data["pure_python"] = False
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["tag"] = f"py3-none-{platform}"  # it knows nothing of Python

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002 - hatch's signature
        """Remove what was built."""
        if version != "editable":
            self._scratch.cleanup()

    def _build(self, source: Path, target: Path) -> bool:
        if os.environ.get("QUIRE_PURE", "") not in ("", "0"):
            return False
        compiler = shlex.split(os.environ.get("CC") or "cc")
        command = [*compiler, "-O2", "-fPIC", "-shared", "-o", str(target), str(source)]
        try:
            ended = subprocess.run(command, capture_output=True, text=True, timeout=COMPILER_SECONDS)
            failure = ended.stderr if ended.returncode else ""
        except (OSError, subprocess.SubprocessError) as error:
            failure = str(error)
        if failure or not target.exists():
            target.unlink(missing_ok=True)
            self.app.display_warning(
                f"quire is installed without {target.name}, which makes reads faster: {failure.strip()[:500]}"
            )
            return False
        return True
