"""Copies of archived stores: the process that serves one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from quire.service import archive_copies
from quire.service.archive_copies import CopyRequest
from tests.manifest.helpers import eventually


def test_a_copy_that_has_ended_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hazard: nobody waited for the process of a copy, and each one stayed in the process table of its driver."""
    (tmp_path / "short_copy.py").write_text("import os\nprint('ready', os.getpid(), end='')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(archive_copies, "MODULE", "short_copy")
    pid = int(archive_copies._start(CopyRequest(url="memory://copies")))
    assert eventually(lambda: not os.path.exists(f"/proc/{pid}"))
