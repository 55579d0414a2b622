"""Scans of the overlay: pending rows over committed ones, in order, regardless of writes, deletions and rollbacks
before."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import pytest

from quire.manifest import overlay as overlay_module
from quire.manifest import tables as t
from quire.manifest.ops.pageindex import ROW, VERSION_NAME, DropPageVersions, PublishPages
from quire.manifest.overlay import Overlay
from quire.manifest.store import ManifestStore
from tests.manifest.helpers import commit, register


@pytest.fixture
def overlay(manifest: ManifestStore) -> Iterator[Overlay]:
    """The tables as an operation sees them, in a transaction that is never committed."""
    overlay = Overlay(manifest.env.handles)
    overlay.begin(manifest.env.begin_write())
    yield overlay
    overlay.txn.abort()


@pytest.mark.parametrize("seed", range(6))
def test_a_scan_matches_a_dictionary(overlay: Overlay, seed: int) -> None:
    """Between two scans, rows may be added, changed, deleted, rolled back or discarded; or nothing happens, and the
    sorted order is reused."""
    rng, view = random.Random(seed), overlay.db_names
    overlay.switch(tracking=True)
    committed: dict[bytes, int] = {}
    model = dict(committed)
    record = t.DB_NAMES.codec.record_type
    start = {key for key, _ in view.scan(b"k")}
    assert not start
    for _ in range(400):
        key = b"k%02x" % rng.randrange(64)
        match rng.randrange(8):
            case 0 | 1:
                model[key] = rng.randrange(100)
                view.put(key, record(model[key]))
            case 2:
                view.delete(key)
                model.pop(key, None)
            case 3:
                overlay.rollback()
                model = dict(committed)
            case 4:
                overlay.undo.clear()  # the batch succeeded
                committed = dict(model)
            case 5 if not rng.randrange(4):
                view.discard()
                overlay.undo.clear()
                committed, model = {}, {}
            case _:
                prefix = rng.choice([b"k", b"k0", b"k1", key, b"\xff"])
                after = rng.choice([None, key])
                expected = [
                    (model_key, value)
                    for model_key, value in sorted(model.items())
                    if model_key.startswith(prefix) and (after is None or model_key > after)
                ]
                assert [(row_key, row.value) for row_key, row in view.scan(prefix, after=after)] == expected


def test_dropping_many_versions_takes_linear_time(manifest: ManifestStore) -> None:
    """For each page that loses its head, another version is searched: not among all versions that are dropped with
    it."""
    count = 40_000
    rows = b"".join(ROW.pack(page, 0, 5 + page, 0, 7, 3, 1, 0, 0) for page in range(count))
    commit(manifest, register(1), PublishPages(1, rows))
    names = b"".join(VERSION_NAME.pack(page, 5 + page) for page in range(count - 1))
    started = time.process_time()
    commit(manifest, DropPageVersions(1, names))
    assert time.process_time() - started < 20, (
        "about 1 s; scanning all of them for each page took minutes for half a million"
    )
    with manifest.read() as txn:
        assert txn.count(t.PAGE_VERSION_HEAD) == txn.count(t.PAGE_VERSION_INDEX) == 1
        assert txn.get(t.PAGE_VERSION_HEAD, 1, count - 1) is not None


def test_the_bound_of_kept_rows_holds_for_rows_that_are_only_written(
    overlay: Overlay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hazard: only `get` enforced the bound, so rows that were written and never read accumulated."""
    monkeypatch.setattr(overlay_module, "KEPT_ROWS_MAX", 8)
    view, record = overlay.meta, t.META.codec.record_type
    for number in range(40):
        view.put(b"k%02d" % number, record(number))
        view.insert(b"i%02d" % number, record(number))
        view.flush()
        view.settle()
        assert view._kept is not None
        assert len(view._kept) <= 8
    assert [view.get(b"k%02d" % number) for number in range(40)] == [record(number) for number in range(40)]
