"""Fixtures for tests that have a manifest: each ends by checking every rule and replaying the feed (M2)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.manifest.store import ManifestStore
from quire.testing.manifest import assert_clean, assert_replays


@pytest.fixture
def path(tmp_path: Path) -> str:
    """Where a test's manifest is."""
    return str(tmp_path / "manifest.lmdb")


@pytest.fixture
def manifest(path: str) -> Iterator[ManifestStore]:
    """An empty manifest; afterwards it must be clean (leaks allowed) and its feed, if whole, must replay."""
    with ManifestStore.open(path) as opened:
        yield opened
        if opened.writer.failure is None:
            assert_clean(opened, leaks=True)
            with opened.read() as txn:
                whole = txn.feed_bounds()[0] == 1
            if whole:  # a trimmed log cannot be replayed from the start
                assert_replays(opened)
