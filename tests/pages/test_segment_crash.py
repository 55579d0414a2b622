"""Whatever power loss keeps, drops or garbles: a scan returns complete transactions, the first ones, and every synced
one."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.errors import Corruption
from quire.durable.files import Disk
from quire.pages.segment_file import IndexWriter, SegmentFile
from quire.pages.segment_scan import SegmentScan, entries_of, parse_heads, recover_segment
from quire.testing.crashdisk import Chooser, CrashDisk, CrashOutcome, drop_all, every_chooser, keep_all
from quire.testing.faults import Fault, FaultyDisk, PowerCut
from tests.pages.segments import DB_ID, TRANSACTIONS, Transaction, image

PAGE_SIZE, FILE_BYTES, FIRST_LSN = 512, 24 << 10, 100
SALTED = 1  # images differ from those of the previous use


def mostly(kind: CrashOutcome, seed: int) -> Chooser:
    """One outcome nine times out of ten: a single lost sector among many is the hardest case to detect."""
    draw = random.Random(seed)
    return lambda options: draw.choice(options) if draw.random() < 0.1 or kind not in options else kind


CHOOSERS = st.one_of(
    st.just(keep_all),
    st.just(drop_all),
    st.integers(0, 2**32).map(lambda seed: random.Random(seed).choice),
    st.builds(mostly, st.sampled_from(list(CrashOutcome)), st.integers(0, 2**32)),
)


class WrittenSegment:
    """A segment on a crash disk, what was appended to it, and what was synced."""

    def __init__(self, disk: Disk, root: str, previous: Sequence[Transaction] = ()) -> None:
        self.disk = disk
        self.path = f"{root}/00000009.seg"
        self.appended: list[Transaction] = []
        self.synced = 0
        self.ends = [0]
        self.durable_lsn = 0
        self.indexed_lsn = 0
        self.heads: list[bytes] = []
        if not previous:
            self.file = self._create(disk, self.path, 9, FIRST_LSN)
            return
        old = self._create(disk, f"{root}/00000002.seg", 2, 10)
        for transaction in previous:
            old.append(transaction.writes(PAGE_SIZE), db_size=transaction.db_size)
        old.close()  # not synced: the previous segment's last writes may still be in flight
        self.file = SegmentFile.recycle(disk, old.path, self.path, db_id=DB_ID, segment_id=9, first_lsn=FIRST_LSN)

    def _create(self, disk: Disk, path: str, segment_id: int, first_lsn: int) -> SegmentFile:
        return SegmentFile.create(
            disk,
            path,
            db_id=DB_ID,
            segment_id=segment_id,
            first_lsn=first_lsn,
            page_size=PAGE_SIZE,
            file_bytes=FILE_BYTES,
        )

    def run(self, transactions: Sequence[Transaction]) -> None:
        for transaction in transactions:
            self.appended.append(transaction)  # before the append: an interrupted append may still leave all of it
            self.ends.append(self.ends[-1] + len(transaction.pages))
            heads = self.file.append(
                transaction.writes(PAGE_SIZE, SALTED),
                db_size=transaction.db_size,
                durable_upto_lsn=self.durable_lsn,
                commit_ms=transaction.commit_ms,
            )
            self.heads.append(heads)
            if transaction.synced:
                self.durable_lsn = self.file.sync()
                self.synced = len(self.appended)
            if transaction.published and transaction.synced:
                self.publish()

    def publish(self) -> None:
        """Write the entries of everything that is synced; a crash may come before that, or before they are used."""
        first = self.indexed_lsn - FIRST_LSN + 1 if self.indexed_lsn else 0
        heads = parse_heads(b"".join(self.heads))[first : self.ends[self.synced]]
        with IndexWriter(self.disk, self.path, self.file.header) as index:
            index.write(first, entries_of(self.file.header, heads).tobytes())
        self.indexed_lsn = self.durable_lsn

    def check(self, file: SegmentFile, scan: SegmentScan) -> int:
        """The scan is a prefix of complete transactions, including every synced one, and each of its pages is
        readable."""
        assert scan.cut in self.ends, "a transaction was split"
        count = self.ends.index(scan.cut)
        assert count >= self.synced, "a synced transaction is lost"
        written = [page for transaction in self.appended[:count] for page in transaction.pages]
        assert scan.entries["page"].tolist() == [page for page, _ in written]
        assert scan.commits["db_size"].tolist() == [transaction.db_size for transaction in self.appended[:count]]
        contents = [file.read_frame(number) for number in range(scan.cut)]
        assert contents == [image(page, fill, PAGE_SIZE, SALTED) or bytes(PAGE_SIZE) for page, fill in written]
        assert scan.proven_lsn <= self.durable_lsn
        return count


def crashed(written: WrittenSegment, disk: CrashDisk, choose: Chooser, indexed: Callable[[list[int]], int]) -> int:
    """Crash, recover with some published commit whose entries were synced, and check; returns the number of
    transactions."""
    with tempfile.TemporaryDirectory() as folder:
        after = disk.crash(f"{folder}/after", choose)
        commits = [lsn for end in written.ends[1:] if (lsn := FIRST_LSN + end - 1) <= written.indexed_lsn]
        with SegmentFile.open(after, after.path("00000009.seg"), db_id=DB_ID, segment_id=9) as file:
            return written.check(file, recover_segment(file, indexed_upto_lsn=indexed([0, *commits])))


@given(transactions=TRANSACTIONS, previous=TRANSACTIONS, choose=CHOOSERS, data=st.data())
def test_a_crash_leaves_complete_transactions_and_every_synced_one(
    transactions: list[Transaction], previous: list[Transaction], choose: Chooser, data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as root:
        disk = CrashDisk(root)
        written = WrittenSegment(disk, root, previous)
        with written.file:
            written.run(transactions)
        crashed(written, disk, choose, lambda choices: data.draw(st.sampled_from(choices)))


@given(transactions=TRANSACTIONS.filter(bool), previous=TRANSACTIONS, choose=CHOOSERS, data=st.data())
def test_power_may_be_lost_at_any_step(
    transactions: list[Transaction], previous: list[Transaction], choose: Chooser, data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as root:
        below = CrashDisk(root)
        steps = sum(
            1 + transaction.synced + 2 * (transaction.synced and transaction.published) for transaction in transactions
        )
        written = WrittenSegment(below, root, previous)
        with written.file:
            disk = FaultyDisk(below, Fault.POWER_CUT, fail_at=data.draw(st.integers(1, steps)), operation="[ws][ry]*")
            written.file = SegmentFile(disk.open(written.path), written.file.header, writable=True)
            written.disk = disk
            with written.file, pytest.raises(PowerCut):
                written.run(transactions)
        crashed(written, below, choose, lambda choices: data.draw(st.sampled_from(choices)))


@pytest.mark.parametrize("recycled", [False, True])
def test_every_outcome_of_one_unsynced_commit(tmp_path: Path, recycled: bool) -> None:
    """One frame, each sector kept, dropped or garbled independently: the commit is there or not."""
    disk = CrashDisk(str(tmp_path / "live"))
    previous = [Transaction(pages=((1, 1), (2, 2), (3, 3)))] if recycled else []
    written = WrittenSegment(disk, disk.root, previous)
    with written.file:
        written.run([Transaction(pages=((1, 2),), published=True), Transaction(pages=((1, 3),), synced=False)])
    for indexed in (min, max):
        counts = [crashed(written, disk, choose, indexed) for choose in every_chooser()]
        assert len(counts) == 27, "three sectors with three outcomes each"
        assert sorted(counts)[-2:] == [1, 2], "the commit survives only if every sector was kept"


@pytest.mark.parametrize("choose", [keep_all, drop_all, random.Random(4).choice])
def test_after_a_crash_a_new_or_recycled_file_is_a_segment_or_garbage(tmp_path: Path, choose: Chooser) -> None:
    """Power is lost at each step of recycling. The manifest then names neither file; but a valid header under the new
    name belongs to the new segment, which has no frames."""
    for step in range(1, 50):
        below = CrashDisk(str(tmp_path / f"live{step}"))
        old = SegmentFile.create(
            below, below.path("a.seg"), db_id=DB_ID, segment_id=2, first_lsn=10, page_size=512, file_bytes=4096
        )
        with old:
            old.append([(1, bytes(512), 0, 0)], db_size=2)
            old.sync()
        disk = FaultyDisk(below, Fault.POWER_CUT, fail_at=step)
        try:
            SegmentFile.recycle(
                disk, below.path("a.seg"), below.path("b.seg"), db_id=DB_ID, segment_id=9, first_lsn=99
            ).close()
        except PowerCut:
            pass
        after = below.crash(str(tmp_path / f"after{step}"), choose)
        assert len(after.names(after.root)) == 1
        if after.exists(after.path("b.seg")):
            with SegmentFile.open(after, after.path("b.seg"), segment_id=9) as segment:
                assert recover_segment(segment).good == 0
        if not disk.fired:
            assert after.exists(after.path("b.seg"))
            return
    raise AssertionError("no clean pass")


@given(transactions=TRANSACTIONS.filter(bool), seed=st.integers(0, 2**32))
def test_damage_below_a_later_commits_durable_lsn_is_corruption(transactions: list[Transaction], seed: int) -> None:
    """The opposite case: no crash, but a sector of a synced transaction is damaged, and one more commit follows."""
    with tempfile.TemporaryDirectory() as root:
        disk = CrashDisk(root)
        written = WrittenSegment(disk, root)
        with written.file as file:
            written.run(
                [*(Transaction(pages=transaction.pages) for transaction in transactions), Transaction(pages=((0, 1),))]
            )
            geometry = file.header.geometry
            damaged_frame = random.Random(seed).randrange(written.ends[-2])
            live = disk.open(written.path)
            position = geometry.frame_offset(damaged_frame) + seed % 64
            live.write_at(bytes([live.read_at(1, position)[0] ^ 0x10]), position)
            live.close()
            with pytest.raises(Corruption) as caught:
                recover_segment(file)
        assert caught.value.where["frame"] == damaged_frame
