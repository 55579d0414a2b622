"""Fixtures for tests that use a manifest; each ends with a check of every rule and a replay of the feed (M2)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.manifest.store import ManifestStore
from quire.testing.manifest import assert_clean, assert_replays


@pytest.fixture
def path(tmp_path: Path) -> str:
    """The path of the test's manifest."""
    return str(tmp_path / "manifest.lmdb")


@pytest.fixture
def manifest(path: str) -> Iterator[ManifestStore]:
    """An empty manifest. After the test it must be clean (leaks are allowed), and its feed, if complete, must
    replay."""
    with ManifestStore.open(path) as manifest:
        yield manifest
        if manifest.writer.failure is None:
            assert_clean(manifest, leaks=True)
            with manifest.read() as txn:
                is_complete = txn.feed_bounds()[0] == 1
            if is_complete:  # a trimmed log cannot be replayed from the start
                assert_replays(manifest)
