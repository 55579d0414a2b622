"""Checks for tests that use a manifest: that it follows its rules, and that its feed can be replayed. They belong in the
teardown of every fixture that opens one.

Raises `AssertionError` with what is wrong.

    >>> import tempfile
    >>> from quire.manifest.store import ManifestStore
    >>> with ManifestStore.open(tempfile.mkdtemp() + "/manifest.lmdb") as manifest:
    ...     assert_clean(manifest, leaks=True)
    ...     assert_replays(manifest)
"""

from __future__ import annotations

import os
import tempfile

from quire.core.clock import SystemClock
from quire.core.settings import ManifestSettings
from quire.manifest import tables as t
from quire.manifest.check import Problem
from quire.manifest.env import ManifestEnv
from quire.manifest.migrations import migrate
from quire.manifest.reads import ReadTxn
from quire.manifest.replay import replay as replay_feed
from quire.manifest.store import ManifestStore

Dump = dict[str, list[tuple[bytes, bytes]]]

NOT_FROM_THE_FEED = frozenset({t.CURSOR_NAMES.name})
"""Derived tables that index a local table: a replica has its own."""


# ── dumps ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
def dump(manifest: ManifestStore, policy: t.Policy | None = None) -> Dump:
    """Return every row of every table (of one policy, if given), as bytes."""
    with manifest.read() as txn:
        return _dump(txn, policy)


def _dump(txn: ReadTxn, policy: t.Policy | None = None) -> Dump:
    wanted = [table for table in t.TABLES.values() if policy is None or table.policy is policy]
    return {table.name: list(txn.raw_scan(table)) for table in wanted}


def difference(left: Dump, right: Dump) -> dict[str, list[tuple[bytes, bytes]]]:
    """Return the rows that are in only one of two dumps, by table."""
    return {
        name: sorted(set(left.get(name, ())) ^ set(right.get(name, ())))
        for name in left.keys() | right.keys()
        if left.get(name, []) != right.get(name, [])
    }


# ── checks ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def problems(manifest: ManifestStore, *, leaks: bool = False) -> list[Problem]:
    """Return what `check` finds, without leaks if they are allowed."""
    return [problem for problem in manifest.check() if not (leaks and problem.leak)]


def assert_clean(manifest: ManifestStore, *, leaks: bool = False) -> None:
    """Assert that the manifest breaks none of its rules; `leaks=True` allows artifacts that nothing refers to."""
    broken = problems(manifest, leaks=leaks)
    assert not broken, "; ".join(map(str, broken))


def replay(manifest: ManifestStore, path: str) -> ManifestEnv:
    """Replay the manifest's feed into a new environment at `path`, which the caller must close."""
    env = ManifestEnv(path, ManifestSettings(), write=True)
    try:
        migrate(env, SystemClock())
        with manifest.read() as txn:
            replay_feed(txn.changes(), env)
    except BaseException:
        env.close()
        raise
    return env


def assert_replays(manifest: ManifestStore) -> None:
    """Assert that replaying the feed into an empty environment gives the same logged tables and derived indexes (M2)."""
    with tempfile.TemporaryDirectory() as directory:
        env = replay(manifest, os.path.join(directory, "replica.lmdb"))
        try:
            for policy in (t.Policy.LOGGED, t.Policy.DERIVED):
                with ReadTxn(env) as txn:
                    theirs = _dump(txn, policy)
                ours = dump(manifest, policy)
                differing = {k: v for k, v in difference(ours, theirs).items() if k not in NOT_FROM_THE_FEED}
                assert not differing, f"the replayed feed gives other {policy.value} tables: {differing}"
        finally:
            env.close()
