"""The writer: order, isolation, back-pressure, idempotency, generations, and what it reports."""

from __future__ import annotations

import threading
import time
from random import Random

import pytest
import structlog
from prometheus_client import CollectorRegistry, generate_latest
from structlog.testing import capture_logs

from quire.core.errors import (
    AlreadyExists,
    InternalError,
    InvalidInput,
    NameTaken,
    OutOfRange,
    Overloaded,
    QuireError,
    StoreClosed,
    UnknownDatabase,
    WrongThread,
)
from quire.core.settings import ManifestSettings
from quire.durable.failpoints import armed
from quire.manifest import tables as t
from quire.manifest.guard import Receipt
from quire.manifest.leases import LentVersion
from quire.manifest.metrics import ManifestCollector
from quire.manifest.ops.artifacts import PutChunk
from quire.manifest.ops.base import Component, Op
from quire.manifest.ops.corrections import CorrectIndex, CorrectRefcount, RestoreLocalRow, RestoreRow
from quire.manifest.ops.databases import RenameDb
from quire.manifest.ops.local import PutReader, RecordMetric
from quire.manifest.overlay import Overlay
from quire.manifest.records import ChunkRecord, IdempotencyRecord, Residency
from quire.manifest.store import ManifestStore
from quire.testing.clock import ManualClock
from quire.testing.manifest import assert_clean, difference, dump
from tests.manifest.batches import BatchMaker, outcome
from tests.manifest.helpers import chunk, eventually, held, register, submit_as_group


def chunks(manifest: ManifestStore) -> set[int]:
    with manifest.read() as txn:
        return {key[1] for key, _ in txn.scan(t.CHUNK_CATALOG)}


# ── order ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_batches_are_applied_in_the_order_of_submit(manifest: ManifestStore) -> None:
    manifest.submit([register(1)])
    guards = [manifest.submit([RenameDb(1, f"name-{n}")]) for n in range(500)]
    sequences = [guard.result(30).sequence for guard in guards]
    assert sequences == list(range(2, 502))
    with manifest.read() as txn:
        assert txn.database_id("name-499") == 1
        assert [change.sequence for change in txn.changes()] == list(range(1, 502))


def test_batches_of_many_threads_keep_each_threads_order(manifest: ManifestStore) -> None:
    manifest.submit([register(n) for n in range(1, 5)]).result()
    sequences: dict[int, list[int]] = {}

    def work(db_id: int) -> None:
        guards = [manifest.submit([RenameDb(db_id, f"{db_id}-{n}")]) for n in range(100)]
        sequences[db_id] = [guard.result(30).sequence for guard in guards]

    threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(of_thread == sorted(of_thread) for of_thread in sequences.values())
    assert sorted(n for of_thread in sequences.values() for n in of_thread) == list(range(2, 402))


def test_a_batch_sees_the_batches_before_it_in_its_group(manifest: ManifestStore) -> None:
    guards = submit_as_group(manifest, [[register(1, "a")], [RenameDb(1, "b")], [register(2, "a")], [chunk(1)]])
    assert [guard.result(30).sequence for guard in guards] == [1, 2, 3, 4]
    assert eventually(lambda: manifest.writer.stats.commits == 2), "the commit of the hold and one group"


# ── isolation ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_failing_batch_fails_alone_between_valid_ones(manifest: ManifestStore) -> None:
    manifest.submit([register(1)]).result()
    before, failing, after = submit_as_group(manifest, [[chunk(1)], [chunk(2), register(1)], [chunk(3)]])
    assert before.result(30).sequence == 2
    with pytest.raises(AlreadyExists, match="database with this id"):
        failing.result(30)
    assert after.result(30).sequence == 3, "a failed batch uses no sequence"
    assert chunks(manifest) == {1, 3}


def test_any_number_of_batches_of_a_group_may_fail(manifest: ManifestStore) -> None:
    manifest.submit([register(1)]).result()
    batches: list[list[Op]] = [[chunk(n), register(1)] if n % 3 else [chunk(n)] for n in range(1, 61)]
    guards = submit_as_group(manifest, batches)
    results = [outcome(guard) for guard in guards]
    assert [isinstance(result, Receipt) for result in results] == [n % 3 == 0 for n in range(1, 61)]
    assert chunks(manifest) == set(range(3, 61, 3))


def test_all_batches_of_a_group_may_fail(manifest: ManifestStore) -> None:
    before = dump(manifest, t.Policy.LOGGED)
    guards = submit_as_group(manifest, [[chunk(n)] for n in range(1, 10)])
    for guard in guards:
        with pytest.raises(UnknownDatabase):
            guard.result(30)
    assert not difference(before, dump(manifest, t.Policy.LOGGED))


def test_a_chunk_that_exists_fails_alone_after_the_optimistic_pass(manifest: ManifestStore) -> None:
    """Inserts assume that keys are new; if LMDB reports otherwise, the group is applied again with checks."""
    manifest.submit([register(1), chunk(5)]).result()
    same, fresh, other, last = submit_as_group(manifest, [[chunk(5)], [chunk(6)], [chunk(7), chunk(5, 11)], [chunk(8)]])
    assert same.result(30).sequence == 2, "putting the same row again succeeds"
    assert fresh.result(30).sequence == 3
    with pytest.raises(AlreadyExists, match="a different chunk"):
        other.result(30)
    assert last.result(30).sequence == 4
    assert chunks(manifest) == {5, 6, 8}


def test_a_failure_and_an_existing_key_in_one_group_are_distinguished(manifest: ManifestStore) -> None:
    manifest.submit([register(1), chunk(5)]).result()
    results = [
        outcome(guard)
        for guard in submit_as_group(
            manifest, [[register(1)], [chunk(5, 11)], [chunk(6)], [register(2, "db1")], [chunk(7)]]
        )
    ]
    kinds = [type(result) for result in results]
    assert kinds == [AlreadyExists, AlreadyExists, Receipt, NameTaken, Receipt]
    assert chunks(manifest) == {5, 6, 7}


@pytest.mark.parametrize("number", [2**64, 2**70, -(2**70)])
def test_a_row_that_cannot_be_encoded_fails_alone(manifest: ManifestStore, number: int) -> None:
    """A local operation has no change record: its row is encoded only when the group is flushed."""
    manifest.submit([register(1)]).result()
    batches: list[list[Op]] = [[chunk(1)], [chunk(2), PutReader(1, 1, number, 1)], [chunk(3)]]
    good, broken, later = submit_as_group(manifest, batches)
    assert isinstance(good.result(30), Receipt)
    with pytest.raises(InvalidInput):
        broken.result(30)
    assert isinstance(later.result(30), Receipt)
    assert chunks(manifest) == {1, 3}


def test_a_batch_that_failed_because_of_an_invalid_one_is_applied_again(manifest: ManifestStore) -> None:
    """Hazard: the group is applied again without the invalid batch, the second batch commits, and its guard still
    raised NameTaken."""
    broken, second = submit_as_group(manifest, [[register(1, "x"), PutReader(1, 1, 2**70, 1)], [register(2, "x")]])
    with pytest.raises(InvalidInput):
        broken.result(30)
    result = outcome(second)
    with manifest.read() as txn:
        committed = txn.database(2) is not None
    assert isinstance(result, Receipt) == committed, (
        f"{result!r}, but the database {'exists' if committed else 'does not exist'}"
    )


@pytest.mark.parametrize(
    "broken_op",
    [
        CorrectRefcount(b"", 1, 0),
        CorrectRefcount(b"abc", 1, 0),
        CorrectRefcount(b"", 0, 0, remove=True),
        CorrectIndex("db_names", b"", 1),
        CorrectIndex("db_names", b"\xff", 1),
        CorrectIndex("db_names", b"x" * 512, 1),
        RestoreRow("retention", b"", None),
        RestoreLocalRow("idempotency", b"", t.IDEMPOTENCY.codec.encode(IdempotencyRecord(1, 1))),
    ],
)
def test_a_malformed_key_fails_its_batch_alone(manifest: ManifestStore, broken_op: Op) -> None:
    """Hazard: LMDB's refusal of a key counted as a commit in doubt, and the writer stopped for all databases."""
    manifest.submit([register(1)]).result()
    good, broken, later = submit_as_group(manifest, [[chunk(1)], [chunk(2), broken_op], [chunk(3)]])
    assert isinstance(good.result(30), Receipt)
    with pytest.raises(InvalidInput):
        broken.result(30)
    assert isinstance(later.result(30), Receipt)
    assert chunks(manifest) == {1, 3}
    assert_clean(manifest, leaks=True)


@pytest.mark.parametrize("number", [2**32, -1, 2**64])
def test_an_id_out_of_range_is_rejected_as_such(manifest: ManifestStore, number: int) -> None:
    manifest.submit([register(1)]).result()
    for op in (chunk(number), chunk(1, generation=number), register(number)):
        with pytest.raises((OutOfRange, UnknownDatabase)):
            manifest.submit([op]).result(30)


class BrokenOp(RecordMetric, frozen=True, tag=9990):
    """An operation with a bug."""

    def apply(self, tables: Overlay, at_ms: int) -> None:
        raise ZeroDivisionError("a bug")


def test_an_unexpected_error_becomes_an_internal_error_of_its_batch(manifest: ManifestStore) -> None:
    manifest.submit([register(1)]).result()
    good, broken, later = submit_as_group(manifest, [[chunk(1)], [chunk(2), BrokenOp(1, 1, [1.0])], [chunk(3)]])
    assert isinstance(good.result(30), Receipt)
    with pytest.raises(InternalError, match="ZeroDivisionError") as caught:
        broken.result(30)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert isinstance(later.result(30), Receipt)
    assert chunks(manifest) == {1, 3}


@pytest.mark.parametrize("ops", [[], [RecordMetric(1, 1, [1.0])] * 65_537])
def test_a_batch_of_no_or_too_many_operations_is_rejected_by_submit(manifest: ManifestStore, ops: list[Op]) -> None:
    with pytest.raises(InvalidInput, match="must have 1 to 65,536"):
        manifest.submit(ops)


def test_random_groups_have_the_result_of_the_same_batches_one_by_one(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Grouping has no visible effect: equal outcomes and equal logged tables, whichever batches fail."""
    for seed in range(6):
        directory, clock = tmp_path_factory.mktemp("grouping"), ManualClock()
        with (
            ManifestStore.open(str(directory / "one.lmdb"), clock=clock) as single,
            ManifestStore.open(str(directory / "all.lmdb"), clock=clock) as grouped,
        ):
            maker, batches, expected = BatchMaker(Random(seed)), [], []
            del maker.stories[
                "cursor"
            ]  # the head moves with the group, so changes that are not durable cannot be acknowledged
            for _ in range(60):
                batches.append(maker.batch(single, maker.rng.randint(1, 3)))
                expected.append(outcome(single.submit(batches[-1])))
            actual = [outcome(guard) for guard in submit_as_group(grouped, batches)]
            assert [(type(r), str(r)) for r in expected] == [(type(r), str(r)) for r in actual]
            assert not difference(dump(single, t.Policy.LOGGED), dump(grouped, t.Policy.LOGGED))
            assert not difference(dump(single, t.Policy.DERIVED), dump(grouped, t.Policy.DERIVED))


# ── back-pressure ─────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_full_queue_blocks_submit_and_then_raises_overloaded(path: str) -> None:
    settings = ManifestSettings(queue_ops_max=3, group_ops_max=3)
    with ManifestStore.open(path, settings=settings) as manifest:
        manifest.submit([register(1)]).result()
        with held(manifest) as hold:
            queued = [manifest.submit([chunk(n)]) for n in range(1, 4)]
            started = time.monotonic()
            with pytest.raises(Overloaded):
                manifest.submit([chunk(4)], timeout=0.05)
            assert time.monotonic() - started >= 0.05
            results: list[QuireError | Receipt] = []
            thread = threading.Thread(target=lambda: results.append(outcome(manifest.submit([chunk(5)], timeout=30))))
            thread.start()
            thread.join(0.05)
            assert thread.is_alive(), "submit waits until the queue has space"
            hold.release()
            thread.join(30)
        assert all(guard.result(30) for guard in queued)
        assert isinstance(results[0], Receipt)
        assert chunks(manifest) == {1, 2, 3, 5}
        assert_clean(manifest, leaks=True)


def test_a_batch_larger_than_a_group_is_still_one_transaction(path: str) -> None:
    with ManifestStore.open(path, settings=ManifestSettings(queue_ops_max=4, group_ops_max=4)) as manifest:
        manifest.submit([register(1)]).result()
        manifest.submit([chunk(n) for n in range(1, 101)]).result(30)
        assert eventually(lambda: manifest.writer.stats.commits == 2)
        with manifest.read() as txn:
            assert len(list(txn.changes())) == 2


def test_a_group_that_takes_too_long_leaves_the_rest_to_the_next(path: str) -> None:
    """Nothing is lost between two groups, not even if the first is applied again because a key exists."""
    with ManifestStore.open(path, settings=ManifestSettings(group_seconds_max=1e-9, group_ops_max=4096)) as manifest:
        manifest.submit([register(1), chunk(1)]).result()
        guards = submit_as_group(manifest, [[chunk(n % 400 + 1)] for n in range(1, 600)])
        assert all(guard.result(30).sequence for guard in guards)
        guards = submit_as_group(manifest, [[register(1)] if n % 5 else [chunk(1000 + n)] for n in range(600)])
        results = [outcome(guard) for guard in guards]
        assert sum(isinstance(result, Receipt) for result in results) == 120
        assert chunks(manifest) == {*range(1, 401), *range(1000, 1600, 5)}
        assert_clean(manifest, leaks=True)


# ── threads and closing ───────────────────────────────────────────────────────────────────────────────────────────────
def test_waiting_on_the_writer_thread_is_rejected(manifest: ManifestStore) -> None:
    manifest.submit([register(1)]).result()
    caught: list[QuireError] = []

    def misuse(_name: str) -> None:
        for wait in (
            lambda: manifest.submit([chunk(1)]).result(1),
            lambda: manifest.writer.when_generation(Component.CHUNK, 99).result(1),
        ):
            try:
                wait()
            except QuireError as error:
                caught.append(error)

    with armed("manifest.commit.durable", misuse):
        manifest.submit([register(2)]).result(30)
    assert [type(error) for error in caught[:2]] == [WrongThread, WrongThread]
    manifest.submit([register(3)]).result(30)


def test_close_commits_queued_batches(path: str) -> None:
    manifest = ManifestStore.open(path)
    manifest.submit([register(1)]).result()
    with held(manifest) as hold:
        guards = [manifest.submit([chunk(n)]) for n in range(1, 50)]
        thread = threading.Thread(target=manifest.close)
        thread.start()
        thread.join(0.05)
        hold.release()
    thread.join(30)
    assert [guard.result(0).sequence for guard in guards] == list(range(2, 51))
    with ManifestStore.open(path) as reopened:
        assert chunks(reopened) == set(range(1, 50))
        assert_clean(reopened, leaks=True)


def test_after_close_everything_is_rejected_and_closing_again_is_allowed(path: str) -> None:
    manifest = ManifestStore.open(path)
    manifest.close()
    manifest.close()
    for use in (
        lambda: manifest.submit([register(1)]),
        lambda: manifest.read(),
        lambda: manifest.check(),
        lambda: manifest.writer.when_generation(Component.JOB, 1).result(5),
        lambda: manifest.env.copy(path + ".copy"),
    ):
        with pytest.raises(StoreClosed):
            use()


# ── idempotency ───────────────────────────────────────────────────────────────────────────────────────────────────────
KEY = b"0123456789abcdef"


def test_a_repeated_key_gets_the_first_result_and_applies_nothing(manifest: ManifestStore) -> None:
    first = manifest.submit([register(1), chunk(1)], key=KEY).result()
    before = dump(manifest)
    second = manifest.submit([register(2), chunk(2)], key=KEY).result()
    assert (second.sequence, second.generations, second.repeated) == (first.sequence, first.generations, True)
    assert not first.repeated
    assert not difference(before, dump(manifest))


def test_a_key_repeated_within_one_group_is_applied_once(manifest: ManifestStore) -> None:
    with held(manifest):
        guards = [manifest.submit([register(1)], key=KEY) for _ in range(3)]
    assert [guard.result(30).repeated for guard in guards] == [False, True, True]
    assert {guard.result(30).sequence for guard in guards} == {1}


def test_a_batch_whose_predecessor_with_its_key_failed_has_its_own_result(manifest: ManifestStore) -> None:
    """Hazard: the abandoned pass gave it the predecessor's result, which was then stored with its own changes."""
    manifest.submit([register(1), chunk(1)]).result()
    with held(manifest):
        # Fails only in the second pass: the first one assumes that the row is new.
        first = manifest.submit([PutChunk(1, 1, 1, ChunkRecord(Residency.LOCAL, 99, 99))], key=KEY, result=b"first")
        second = manifest.submit([chunk(2)], key=KEY, result=b"second")
    with pytest.raises(AlreadyExists):
        first.result(30)
    assert second.result(30).result == b"second"
    repeated = manifest.submit([chunk(2)], key=KEY, result=b"third").result(30)
    assert (repeated.repeated, repeated.result) == (True, b"second")


def test_a_failed_batch_does_not_use_its_key(manifest: ManifestStore) -> None:
    with pytest.raises(UnknownDatabase):
        manifest.submit([chunk(1)], key=KEY).result()
    assert not manifest.submit([register(1)], key=KEY).result().repeated


def test_a_key_is_remembered_across_a_reopen_until_it_expires(path: str) -> None:
    clock = ManualClock()
    settings = ManifestSettings(idempotency_seconds=60)
    with ManifestStore.open(path, clock=clock, settings=settings) as manifest:
        first = manifest.submit([register(1)], key=KEY).result()
    clock.advance(59)
    with ManifestStore.open(path, clock=clock, settings=settings) as manifest:
        assert manifest.submit([register(1)], key=KEY).result().sequence == first.sequence
        clock.advance(2)
        fresh = manifest.submit([register(2)], key=KEY).result()
        assert (fresh.sequence, fresh.repeated) == (first.sequence + 1, False)
        assert_clean(manifest)


@pytest.mark.parametrize("key", [b"", b"short", b"x" * 17])
def test_a_key_of_another_length_is_rejected(manifest: ManifestStore, key: bytes) -> None:
    with pytest.raises(InvalidInput, match="16 bytes"):
        manifest.submit([register(1)], key=key)


# ── generations, time, reports ────────────────────────────────────────────────────────────────────────────────────────
def test_each_component_counts_the_batches_that_touched_it(manifest: ManifestStore) -> None:
    first = manifest.submit([register(1), chunk(1), chunk(2)]).result()
    assert first.generations == {Component.DATABASE: 1, Component.CHUNK: 1}
    assert manifest.submit([chunk(3)]).result().generations == {Component.CHUNK: 2}
    assert manifest.submit([RecordMetric(1, 1, [1.0])]).result().generations == {}
    with manifest.read() as txn:
        stored = {Component(key[0]): row.generation for key, row in txn.scan(t.GENERATION_WATERMARKS)}
    assert stored == {Component.DATABASE: 1, Component.CHUNK: 2}


def test_generations_and_sequences_continue_after_a_reopen(path: str) -> None:
    with ManifestStore.open(path) as manifest:
        manifest.submit([register(1)]).result()
    with ManifestStore.open(path) as manifest:
        receipt = manifest.submit([register(2)]).result()
        assert (receipt.sequence, receipt.generations) == (2, {Component.DATABASE: 2})
        assert manifest.writer.when_generation(Component.DATABASE, 2).result(0) == 2


def test_recorded_times_never_decrease_even_if_the_clock_is_set_back(path: str) -> None:
    clock = ManualClock()
    with ManifestStore.open(path, clock=clock) as manifest:
        first = manifest.submit([register(1)]).result()
        clock.jump(-3600)
        assert manifest.submit([register(2)]).result().committed_at_ms >= first.committed_at_ms
    with ManifestStore.open(path, clock=clock) as manifest:
        assert manifest.submit([register(3)]).result().committed_at_ms >= first.committed_at_ms


def test_no_commit_is_earlier_than_a_stored_lease_even_if_the_clock_is_set_back(path: str) -> None:
    """Hazard: after a restart, what reached zero seemed older than the lease, and was deleted under its reader."""
    with ManifestStore.open(path, clock=ManualClock(now_ms=1_000_000)) as manifest:
        manifest.submit([register(1)]).result()
    with ManifestStore.open(path, clock=ManualClock(now_ms=2_000_000)) as manifest:
        manifest.leases.hold([LentVersion(1, 5)], 300)
    with ManifestStore.open(path, clock=ManualClock(now_ms=1_500_000)) as manifest:
        kept = manifest.leases.kept_since(1)
        assert kept is not None
        assert manifest.submit([chunk(1)]).result().committed_at_ms >= kept[0]


def test_each_commit_is_one_structured_event(manifest: ManifestStore) -> None:
    with capture_logs() as logs:
        manifest.submit([register(1), chunk(1)]).result()
        manifest.submit([chunk(2)]).result()
        assert eventually(lambda: len(logs) == 2)
    structlog.reset_defaults()
    first, second = (log for log in logs if log["event"] == "manifest.commit")
    assert (first["operations"], first["batches"], first["failed"], first["sequence"]) == (2, 1, 0, 1)
    assert first["generations"] == {"database": 1, "chunk": 1}
    assert (second["operations"], second["sequence"]) == (1, 2)
    assert second["generations"] == {"chunk": 2}, (
        "the generations of this commit, not the current ones of all components"
    )
    assert first["seconds"] >= 0
    assert first["pages"] >= 0
    assert first["rows"] >= 4


def test_prometheus_gets_the_counts_of_the_writer(manifest: ManifestStore) -> None:
    manifest.submit([register(1), chunk(1)]).result()
    outcome(manifest.submit([register(1)]))
    assert eventually(lambda: manifest.writer.stats.batches == 2)
    stats = manifest.writer.stats
    counted = stats.commits, stats.batches
    assert counted == (2, 2)
    manifest.feed.register(name="slow")
    registry = CollectorRegistry()
    registry.register(ManifestCollector(manifest))
    assert eventually(lambda: stats.batches == 3)
    text = generate_latest(registry).decode()
    for line in (
        "quire_manifest_commits_total 3.0",
        "quire_manifest_batches_total 3.0",
        "quire_manifest_batches_failed_total 1.0",
        "quire_manifest_operations_total 3.0",
        'quire_manifest_commit_seconds_bucket{le="+Inf"} 3.0',
        "quire_manifest_commit_seconds_count 3.0",
        'quire_feed_lag{cursor="slow"} 1.0',
    ):
        assert line in text
    assert "quire_manifest_file_bytes" in text
    assert "quire_manifest_readers" in text
