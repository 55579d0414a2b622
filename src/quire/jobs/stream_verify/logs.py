"""Holding the manifest logs of streams to their rules, many at once: for `quire verify` and `quire manifest verify`.

Rules
  1. First each log by itself: files, order, snapshots, state, which objects there are. Then the objects' bodies, in groups of
     all logs. The first needs the store's files: a runner whose tasks do not see them leaves that to threads here.
  2. What is wrong is told if a second look says the same: a live owner moves and deletes meanwhile.
  3. A log that cannot be read now keeps no other from being looked at; its error is raised at the end.

Reads only; works beside a live owner. Threads: functions without state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from quire.core.errors import Corruption, QuireError
from quire.jobs.runner import Runner, Tick, no_tick
from quire.jobs.stream_verify.run import BodiesTask, LogFound, LogTask, check_bodies, check_log
from quire.stream.mlog_verify import LogProblem

GROUP_OBJECTS = 64
"""Bodies that one task reads: 16 MiB of full chunks."""


def verify_logs(
    tasks: Sequence[LogTask], runner: Runner, here: Runner, *, deep: bool = True, tick: Tick = no_tick
) -> Iterator[tuple[int, LogProblem]]:
    """(stream, broken rule) of these logs. `here` is a runner that sees the files; `deep` reads objects whole."""
    first: QuireError | None = None
    found: list[LogFound] = []
    doubtful: list[LogTask] = []
    for answer in (runner if runner.shares_disk else here).map(check_log, tasks, tick=tick):
        if isinstance(answer.error, Corruption):
            yield tasks[answer.key].stream_id, _unreadable(answer.error)
            continue
        if answer.error is not None:
            first = first or answer.error
            continue
        found.append(answer.result())
        if found[-1].problems:
            doubtful.append(tasks[answer.key])
    for again in here.map(check_log, doubtful, tick=tick):
        if again.error is not None:
            first = first or again.error
            continue
        yield from ((again.result().stream_id, each) for each in again.result().problems)
    url, prefixes, store_id = (tasks[0].url, tasks[0].prefixes, tasks[0].store_id) if tasks else ("", (), "")
    wanted = list(_bodies(found)) if deep else []
    starts = range(0, len(wanted), GROUP_OBJECTS)
    groups = [
        BodiesTask(url=url, prefixes=prefixes, bodies=tuple(wanted[start : start + GROUP_OBJECTS]), store_id=store_id)
        for start in starts
    ]
    for bodies in runner.map(check_bodies, groups, tick=tick):
        if bodies.error is not None:
            first = first or bodies.error
            continue
        yield from bodies.result()
    if first is not None:
        raise first


def _unreadable(error: Corruption) -> LogProblem:
    """Damage that kept the rest of a log from being looked at."""
    path = error.where.get("path", "")
    return LogProblem(rule="L0", what=f"{error.what} ({path})" if path else error.what, where=error.where)


def _bodies(found: Sequence[LogFound]) -> Iterator[tuple[int, str, int, int]]:
    for log in found:
        yield from ((log.stream_id, "chunk", index, index) for index in log.chunks)
        yield from ((log.stream_id, "bundle", span[0], span[1]) for span in log.bundles)
        yield from ((log.stream_id, "snapshot", number, number) for number in log.snapshots)
