"""A tamper-evident audit log in a stream: each entry contains the hash of the previous one.

A stream is append-only: a record gets a number and never changes. Many threads append and share syncs, and each entry
is on disk before its action is acknowledged. Old segments are compressed and moved to the object store; reading them
works the same. With the last SHA-256 hash of the chain, stored elsewhere, you can prove that no entry was altered,
removed or inserted.

    python examples/audit_log.py [--store DIRECTORY] [--entries N]

The exporter at the end is a consumer: a name with a durable position, so it exports each entry once.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import quire

BEGINNING = "0" * 64


@dataclass(frozen=True, slots=True)
class Entry:
    """An action of a user."""

    who: str
    what: str
    on: str
    before: str
    """The hash of the previous entry."""

    def packed(self) -> bytes:
        """The payload of the record in the stream."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":")).encode()


class AuditLog:
    """Entries in a stream, each with the hash of its predecessor. Any number of threads can write."""

    def __init__(self, stream: quire.Stream) -> None:
        self._stream = stream
        self._order = threading.Lock()
        self._last = BEGINNING
        for record in stream.read(max(stream.first_record, stream.end_record - 1)):
            self._last = digest(record.payload)

    def record(self, who: str, what: str, on: str) -> int:
        """Append an entry and wait until it is on disk; return its number."""
        with self._order:  # the chain has one order; the wait for the disk is outside the lock, and shared
            payload = Entry(who, what, on, self._last).packed()
            guard = self._stream.append(payload)
            self._last = digest(payload)
        guard.result()
        return guard.record

    @property
    def last_hash(self) -> str:
        """The last hash, which an auditor stores elsewhere."""
        return self._last

    def entries(self, since_ms: int = 0) -> Iterator[tuple[int, int, dict[str, Any]]]:
        """(number, time, entry), starting at a time."""
        start = self._stream.seek(since_ms) if since_ms else self._stream.first_record
        for record in self._stream.read(start):
            yield record.id, record.timestamp_ms, json.loads(record.payload)

    def broken(self, last_hash: str) -> int | None:
        """The number of the first entry that breaks the chain, 0 if the last hash differs, `None` if the chain is intact."""
        before = BEGINNING
        for record in self._stream.read():
            if json.loads(record.payload)["before"] != before:
                return record.id
            before = digest(record.payload)
        return None if before == last_hash else 0

    def export(self, consumer: str, most: int) -> list[int]:
        """Export entries that a consumer has not read yet, up to a limit; return their numbers."""
        self._stream.register(consumer)
        start = self._stream.position(consumer)
        sent = [record.id for record in self._stream.read(start, min(start + most, self._stream.end_record))]
        if sent:
            self._stream.ack(consumer, sent[-1] + 1)
        return sent


def digest(payload: bytes) -> str:
    """The hash of an entry."""
    return hashlib.sha256(payload).hexdigest()


def main(arguments: Sequence[str] | None = None) -> int:
    """Fill a log, move it to the object store, examine it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", default="", help="a directory; a temporary one if not given")
    parser.add_argument("--entries", type=int, default=2_000)
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as temporary, quire.open(given.store or temporary) as store:
        stream = store.stream("audit", create=True)
        log = AuditLog(stream)

        def act(number: int) -> int:
            who, what = f"user {number % 7}", ("read", "changed", "deleted")[number % 11 % 3]
            return log.record(who, what, f"invoice {number % 50}")

        with ThreadPoolExecutor(16) as threads:
            list(threads.map(act, range(given.entries)))
        evidence = log.last_hash
        print(f"{stream.end_record - stream.first_record} entries; the last hash is {evidence[:16]}…")

        stream.seal()
        stream.upload()
        stream.evict(warm=True)
        tiers = stream.info()
        print(
            f"moved: {tiers.remote_segments} segments in the object store, {tiers.warm_segments} compressed ones here"
        )

        middle = next(stream.read(stream.first_record + given.entries // 2)).timestamp_ms
        deleted = Counter(entry["who"] for _, _, entry in log.entries(middle) if entry["what"] == "deleted")
        print(
            "who deleted most since half-time:", ", ".join(f"{who} ({count})" for who, count in deleted.most_common(3))
        )

        print("chain:", "sound" if log.broken(evidence) is None else "BROKEN")
        forged = store.stream("forged", create=True)
        forged.append([record.payload for record in stream.read() if record.id != given.entries // 3]).result()
        print("a copy that leaves an entry out: broken at number", AuditLog(forged).broken(evidence))
        store.drop("forged")

        batches = [len(log.export("warehouse", 700)) for _ in range(4)]
        print(f"exported in batches of {batches}: each entry once")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
