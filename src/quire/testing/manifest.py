"""Checks for tests that have a manifest: hold it to its rules, and replay its feed. They belong into the teardown of every
fixture that opens one. Raises `AssertionError` that names what is wrong.

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
"""Derived tables that index a local one: a replica has its own."""


# ── looking ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def dump(manifest: ManifestStore, policy: t.Policy | None = None) -> Dump:
    """Every row of every table (of one policy, if given), as bytes."""
    with manifest.read() as txn:
        return _dump(txn, policy)


def _dump(txn: ReadTxn, policy: t.Policy | None = None) -> Dump:
    wanted = [table for table in t.TABLES.values() if policy is None or table.policy is policy]
    return {table.name: list(txn.raw_scan(table)) for table in wanted}


def difference(left: Dump, right: Dump) -> dict[str, list[tuple[bytes, bytes]]]:
    """Rows that are in only one of two dumps, by table."""
    return {
        name: sorted(set(left.get(name, ())) ^ set(right.get(name, ())))
        for name in left.keys() | right.keys()
        if left.get(name, []) != right.get(name, [])
    }


# ── holding it to its rules ───────────────────────────────────────────────────────────────────────────────────────────
def problems(manifest: ManifestStore, *, leaks: bool = False) -> list[Problem]:
    """What `check` finds; leaks are left out if they are allowed."""
    return [problem for problem in manifest.check() if not (leaks and problem.leak)]


def assert_clean(manifest: ManifestStore, *, leaks: bool = False) -> None:
    """The manifest breaks none of its rules; with `leaks=True` artifacts that nobody refers to are fine."""
    broken = problems(manifest, leaks=leaks)
    assert not broken, "; ".join(map(str, broken))


def replay(manifest: ManifestStore, path: str) -> ManifestEnv:
    """Replay the manifest's feed into a new environment at `path`. The caller closes it."""
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
    """Replaying the feed into an empty environment gives the same logged tables, and the indexes derived of them (M2)."""
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


# ── feeding it ────────────────────────────────────────────────────────────────────────────────────────────────────────
