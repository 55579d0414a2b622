"""Streams in `quire verify`: the runner checks every copy of every segment, and the manifest logs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import quire
from quire.durable.names import Tier
from quire.jobs.stream_verify.run import LogTask, verify_logs
from quire.manifest import tables as t
from quire.stream.mlog_format import COPY_BYTES, decode_copy
from quire.stream.stream import Stream
from tests.jobs.small_stream import SETTINGS, fill


@pytest.fixture
def store(tmp_path: Path) -> Iterator[quire.Store]:
    with quire.open(tmp_path / "store", settings=SETTINGS) as store:
        yield store
        assert store.manifest.check() == []


@pytest.fixture
def clicks(store: quire.Store) -> Stream:
    """Segment 1: hot · 2: hot and compressed · 3: compressed · 4: all copies · 5: object only."""
    stream = store.stream("clicks", create=True)
    fill(stream, 5)
    stream.compress(2, 3)
    stream.evict(3)
    stream.upload(4, 5)
    stream.evict(5, warm=True)
    stream.ledger.project_now()
    return stream


def states(store: quire.Store) -> dict[int, str]:
    with store.manifest.read() as txn:
        return {key[1]: row.verify_state.name.lower() for key, row in txn.scan(t.WAL_CATALOG)}


def flip(path: str | Path, offset: int = 200) -> None:
    raw = bytearray(Path(path).read_bytes())
    raw[offset] ^= 1
    Path(path).write_bytes(raw)


def segment_object(store: quire.Store, stream: Stream, segment_id: int) -> Path:
    segment = stream.ledger.view.get(segment_id)
    assert segment is not None
    return Path(store.path, "objects", *segment.key.split("/"))


def test_a_sound_stream_is_verified_and_the_result_recorded(store: quire.Store, clicks: Stream) -> None:
    store.checkpoint("clicks")  # chunks that share bytes are not verified twice
    result = store.heavy.verify(runner="threads").result
    assert (result["verified"], result["missing"], result["altered"], result["logs"]) == (5, 0, 0, [])
    assert set(states(store).values()) == {"verified"}
    assert store.heavy.verify(runner="threads", max_age_seconds=3600).result["verified"] == 0, "verified recently"
    assert clicks.compare() == []


@pytest.mark.parametrize(
    ("segment", "tier"), [(1, Tier.HOT), (2, Tier.HOT), (2, Tier.WARM), (3, Tier.WARM), (4, None), (5, None)]
)
def test_a_flipped_bit_in_any_copy_is_found(
    store: quire.Store, clicks: Stream, segment: int, tier: Tier | None
) -> None:
    path = segment_object(store, clicks, segment) if tier is None else clicks.files.segment(tier, segment)
    flip(path)
    result = store.heavy.verify(runner="threads").result
    assert (result["verified"], result["altered"]) == (4, 1)
    assert states(store)[segment] == "altered"
    (damaged,) = store.heavy.damaged()
    assert damaged["state"] == "ALTERED"
    flip(path)
    assert store.heavy.verify(runner="threads").result["altered"] == 0
    assert store.heavy.damaged() == []


def test_a_missing_copy_is_reported(store: quire.Store, clicks: Stream) -> None:
    Path(clicks.files.segment(Tier.HOT, 1)).unlink()
    segment_object(store, clicks, 5).unlink()
    Path(clicks.files.segment(Tier.HOT, 2)).unlink()  # the compressed copy remains, and one local copy is sufficient
    result = store.heavy.verify(runner="threads").result
    assert (result["missing"], result["verified"]) == (2, 3)
    assert {segment_id: state for segment_id, state in states(store).items() if state != "verified"} == {
        1: "missing",
        5: "missing",
    }


# ── logs ──────────────────────────────────────────────────────────────────────────────────────────────────────────────
def log_problems(store: quire.Store, *streams: Stream, deep: bool = True) -> list[tuple[int, str]]:
    context = store._parts.context
    runner = context.thread_runner()
    with store.manifest.read() as txn:
        prefixes, store_id = txn.object_prefixes(), txn.store_id()
    tasks = [
        LogTask(
            stream_id=stream.stream_id, root=store.path, url=store.objects_url, prefixes=prefixes, store_id=store_id
        )
        for stream in streams
    ]
    return [
        (number, problem.rule) for number, problem in verify_logs(tasks, runner, runner, deep=deep) if not problem.leak
    ]


@pytest.fixture
def logs(store: quire.Store) -> list[Stream]:
    streams = [store.stream(name, create=True) for name in ("clicks", "taps")]
    for stream in streams:
        for _ in range(4):
            fill(stream, 1, records=2)
            stream.ledger.log.rotate()
        stream.ledger.log.upload()
    return streams


def test_logs_of_many_streams_are_checked_together(store: quire.Store, logs: list[Stream]) -> None:
    assert log_problems(store, *logs) == []
    clicks, taps = logs
    objects = taps.ledger.log.objects
    assert objects is not None
    flip(Path(store.path, "objects", *objects.chunk_key(1).split("/")), 90)
    assert log_problems(store, *logs, deep=False) == []
    assert log_problems(store, *logs) == [(taps.stream_id, "L5")]
    flip(clicks.ledger.log.files.chunk(2), 90)
    assert {rule for number, rule in log_problems(store, *logs) if number == clicks.stream_id} == {"L1"}
    result = store.heavy.verify(runner="threads").result
    assert [problem.split(":")[0] for problem in result["logs"]] == [
        f"manifest log of stream {clicks.stream_id}, L1",
        f"manifest log of stream {taps.stream_id}, L5",
    ]
    flip(clicks.ledger.log.files.chunk(2), 90)


def test_a_log_in_a_namespace_is_read_from_that_namespace(store: quire.Store, tmp_path: Path) -> None:
    """The objects of all logs were read from the namespace of the first log, and missing ones were skipped."""
    store.namespaces.create("cold", str(tmp_path / "cold"))
    store.create("clicks", "stream")
    store.create("taps", "stream", namespace="cold")
    directories = {store.stream("clicks"): Path(store.path, "objects"), store.stream("taps"): tmp_path / "cold"}
    for stream in directories:
        for _ in range(4):
            fill(stream, 1, records=2)
            stream.ledger.log.rotate()
        stream.ledger.log.upload()
    assert store.heavy.verify(runner="threads").result["logs"] == []
    for stream, directory in directories.items():
        objects = stream.ledger.log.objects
        assert objects is not None
        flip(directory.joinpath(*objects.chunk_key(1).split("/")), 90)
    result = store.heavy.verify(runner="threads").result
    assert sorted(problem.split(":")[0] for problem in result["logs"]) == [
        f"manifest log of stream {stream.stream_id}, L5" for stream in directories
    ]


def test_a_chunk_of_another_store_is_reported(store: quire.Store, logs: list[Stream]) -> None:
    """It has the name, the index and the records of our chunk."""
    clicks, taps = logs
    objects = taps.ledger.log.objects
    assert objects is not None
    local, remote = (
        Path(clicks.ledger.log.files.chunk(1)),
        Path(store.path, "objects", *objects.chunk_key(1).split("/")),
    )
    for path in (local, remote):
        data = path.read_bytes()
        copy = decode_copy(data)
        assert copy is not None
        foreign = copy._replace(identity=copy.identity._replace(store_id=b"another store..."))
        path.write_bytes(data[:-COPY_BYTES] + foreign.encode())
    result = store.heavy.verify(runner="threads").result
    assert [problem.split(":")[0] for problem in result["logs"]] == [
        f"manifest log of stream {clicks.stream_id}, L1",
        *[f"manifest log of stream {taps.stream_id}, L5"] * 2,
    ]
    assert all("another store" in finding for finding in result["logs"]), result["logs"]


def test_a_problem_that_a_second_check_does_not_find_is_not_reported(
    store: quire.Store, logs: list[Stream], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A live owner moves objects between the listing and the check."""
    from quire.jobs.stream_verify import run
    from quire.stream.mlog_verify import LogProblem

    checked_ids: list[int] = []
    original = run.check_log

    def check_log(task: LogTask, tools: Any) -> Any:
        report = original(task, tools)
        checked_ids.append(task.stream_id)
        if checked_ids.count(task.stream_id) > 1:
            return report
        problems = (LogProblem(rule="L7", what="a segment's object is missing"),)
        return type(report)(report.stream_id, problems, report.chunks, report.bundles, report.snapshots)

    monkeypatch.setattr(run, "check_log", check_log)
    assert log_problems(store, *logs) == []
    assert sorted(checked_ids) == sorted([stream.stream_id for stream in logs] * 2)


def test_a_log_that_can_be_read_in_a_second_check_is_not_reported(
    store: quire.Store, logs: list[Stream], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log that could not be read was reported after the first check. Its objects are verified after the second."""
    from quire.core.errors import Corruption
    from quire.jobs.stream_verify import run

    clicks, taps = logs
    checked_ids: list[int] = []
    original = run.check_log

    def check_log(task: LogTask, tools: Any) -> Any:
        checked_ids.append(task.stream_id)
        if task.stream_id == clicks.stream_id and checked_ids.count(clicks.stream_id) == 1:
            raise Corruption("stream.json is damaged", path="stream.json")
        return original(task, tools)

    monkeypatch.setattr(run, "check_log", check_log)
    assert log_problems(store, *logs) == []
    assert sorted(checked_ids) == sorted([clicks.stream_id, clicks.stream_id, taps.stream_id])
    objects = clicks.ledger.log.objects
    assert objects is not None
    flip(Path(store.path, "objects", *objects.chunk_key(1).split("/")), 90)
    checked_ids.clear()
    assert log_problems(store, *logs) == [(clicks.stream_id, "L5")]
