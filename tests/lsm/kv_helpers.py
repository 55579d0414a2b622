"""Shared by the tests of the engine: small settings, a model, and assertions that compare the engine with it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from quire.core.settings import LsmSettings
from quire.durable.files import Disk, OsDisk
from quire.lsm.kv import Kv
from quire.lsm.reading import KvRanges, KvSnapshot
from quire.lsm.verify import problems
from quire.manifest import tables as t
from quire.store.store import Store

TINY = LsmSettings(
    memtable_bytes=2_000,
    table_bytes=1_024,
    block_bytes=256,
    level0_tables=3,
    level0_stop=6,
    level_bytes=4_000,
    manifest_log_bytes=600,
    cache_bytes=20_000,
)
"""Flushes, compactions and checkpoints happen after a few writes."""


class Model:
    """A dictionary with a history: the content of the database at each lsn."""

    def __init__(self) -> None:
        self.now: dict[bytes, bytes] = {}
        self.at: dict[int, dict[bytes, bytes]] = {0: {}}

    def write(self, lsn: int, batch: Mapping[bytes, bytes | None]) -> None:
        self.now = with_batch(self.now, batch)
        self.at[lsn] = self.now


def with_batch(state: Mapping[bytes, bytes], batch: Mapping[bytes, bytes | None]) -> dict[bytes, bytes]:
    after = {**state, **batch}
    return {key: value for key, value in after.items() if value is not None}


def open_kv(
    base: Path | str, disk: Disk | None = None, settings: LsmSettings = TINY, *, background: bool = False
) -> Kv:
    return Kv.open(disk or OsDisk(), f"{base}/lsm/00000001", settings, background=background)


def assert_same(reader: Kv | KvSnapshot, expected: Mapping[bytes, bytes], extra: tuple[bytes, ...] = ()) -> None:
    """Assert that every way of reading returns the content of the model."""
    pairs = sorted(expected.items())
    assert list(reader.scan()) == pairs
    assert list(reader.scan(reverse=True)) == pairs[::-1]
    for key in (*expected, *extra):
        assert reader.get(key) == expected.get(key), key


def assert_range(reader: KvRanges, expected: Mapping[bytes, bytes], low: bytes, high: bytes | None) -> None:
    pairs = [pair for pair in sorted(expected.items()) if low <= pair[0] and (high is None or pair[0] < high)]
    assert list(reader.scan(low=low, high=high)) == pairs
    assert list(reader.scan(low=low, high=high, reverse=True)) == pairs[::-1]


def assert_sound(kv: Kv) -> None:
    """Assert that the checker finds no problem."""
    assert list(problems(kv)) == []


def forget_ends(store: Store) -> None:
    """Remove what versions before `lsm_ends` did not record about key-value databases."""
    env = store.manifest.env
    with env.begin_write() as txn:
        txn.drop(env.handles[t.LSM_ENDS.name], delete=False)
