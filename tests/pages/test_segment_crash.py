"""Whatever power loss keeps, drops or garbles: a scan gives whole transactions, the first ones, and every synced one."""

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
SALTED = 1  # other images than those of the former life


def mostly(kind: CrashOutcome, seed: int) -> Chooser:
    """One outcome nine times out of ten: one lost sector among many is the hardest case to see."""
    draw = random.Random(seed)
    return lambda options: draw.choice(options) if draw.random() < 0.1 or kind not in options else kind


CHOOSERS = st.one_of(
    st.just(keep_all),
    st.just(drop_all),
    st.integers(0, 2**32).map(lambda seed: random.Random(seed).choice),
    st.builds(mostly, st.sampled_from(list(CrashOutcome)), st.integers(0, 2**32)),
)


class Written:
    """A segment on a crash disk, what was appended, and what a sync has covered."""

    def __init__(self, disk: Disk, root: str, former: Sequence[Transaction] = ()) -> None:
        self.disk = disk
        self.path = f"{root}/00000009.seg"
        self.appended: list[Transaction] = []
        self.synced = 0
        self.ends = [0]
        self.durable_lsn = 0
        self.indexed_lsn = 0
        self.heads: list[bytes] = []
        if not former:
            self.file = self._create(disk, self.path, 9, FIRST_LSN)
            return
        old = self._create(disk, f"{root}/00000002.seg", 2, 10)
        for transaction in former:
            old.append(transaction.writes(PAGE_SIZE), db_size=transaction.db_size)
        old.close()  # not synced: the former life's last writes may still be on their way
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
            self.appended.append(transaction)  # before: an append that is cut short may still leave all of it
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
        """Write the entries of everything that is synced; the crash may come before they are, or before they are relied on."""
        first = self.indexed_lsn - FIRST_LSN + 1 if self.indexed_lsn else 0
        heads = parse_heads(b"".join(self.heads))[first : self.ends[self.synced]]
        with IndexWriter(self.disk, self.path, self.file.header) as index:
            index.write(first, entries_of(self.file.header, heads).tobytes())
        self.indexed_lsn = self.durable_lsn

    def check(self, file: SegmentFile, scan: SegmentScan) -> int:
        """The scan is a prefix of whole transactions with every synced one, and each page of it can be read."""
        assert scan.cut in self.ends, "a transaction was cut in two"
        count = self.ends.index(scan.cut)
        assert count >= self.synced, "a synced transaction is gone"
        written = [page for transaction in self.appended[:count] for page in transaction.pages]
        assert scan.entries["page"].tolist() == [page for page, _ in written]
        assert scan.commits["db_size"].tolist() == [transaction.db_size for transaction in self.appended[:count]]
        found = [file.read_frame(number) for number in range(scan.cut)]
        assert found == [image(page, fill, PAGE_SIZE, SALTED) or bytes(PAGE_SIZE) for page, fill in written]
        assert scan.proven_lsn <= self.durable_lsn
        return count


def crashed(written: Written, disk: CrashDisk, choose: Chooser, indexed: Callable[[list[int]], int]) -> int:
    """Crash, recover with some commit published whose entries were synced, check; how many transactions there are."""
    with tempfile.TemporaryDirectory() as folder:
        after = disk.crash(f"{folder}/after", choose)
        commits = [lsn for end in written.ends[1:] if (lsn := FIRST_LSN + end - 1) <= written.indexed_lsn]
        with SegmentFile.open(after, after.path("00000009.seg"), db_id=DB_ID, segment_id=9) as file:
            return written.check(file, recover_segment(file, indexed_upto_lsn=indexed([0, *commits])))


@given(transactions=TRANSACTIONS, former=TRANSACTIONS, choose=CHOOSERS, data=st.data())
def test_a_crash_leaves_whole_transactions_and_every_synced_one(
    transactions: list[Transaction], former: list[Transaction], choose: Chooser, data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as root:
        disk = CrashDisk(root)
        written = Written(disk, root, former)
        with written.file:
            written.run(transactions)
        crashed(written, disk, choose, lambda choices: data.draw(st.sampled_from(choices)))


@given(transactions=TRANSACTIONS.filter(bool), former=TRANSACTIONS, choose=CHOOSERS, data=st.data())
def test_power_may_go_off_at_any_step(
    transactions: list[Transaction], former: list[Transaction], choose: Chooser, data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as root:
        below = CrashDisk(root)
        steps = sum(1 + each.synced + 2 * (each.synced and each.published) for each in transactions)
        made = Written(below, root, former)
        with made.file:
            disk = FaultyDisk(below, Fault.POWER_CUT, fail_at=data.draw(st.integers(1, steps)), operation="[ws][ry]*")
            made.file = SegmentFile(disk.open(made.path), made.file.header, writable=True)
            made.disk = disk
            with made.file, pytest.raises(PowerCut):
                made.run(transactions)
        crashed(made, below, choose, lambda choices: data.draw(st.sampled_from(choices)))


@pytest.mark.parametrize("recycled", [False, True])
def test_every_outcome_of_one_unsynced_commit(tmp_path: Path, recycled: bool) -> None:
    """One frame, each sector kept, dropped or garbled on its own: the commit is there or not."""
    disk = CrashDisk(str(tmp_path / "live"))
    former = [Transaction(pages=((1, 1), (2, 2), (3, 3)))] if recycled else []
    written = Written(disk, disk.root, former)
    with written.file:
        written.run([Transaction(pages=((1, 2),), published=True), Transaction(pages=((1, 3),), synced=False)])
    for indexed in (min, max):
        counts = [crashed(written, disk, choose, indexed) for choose in every_chooser()]
        assert len(counts) == 27, "three sectors, three fates"
        assert sorted(counts)[-2:] == [1, 2], "only where everything was kept is the commit there"


@pytest.mark.parametrize("choose", [keep_all, drop_all, random.Random(4).choice])
def test_what_a_crash_leaves_of_a_new_or_recycled_file_is_a_segment_or_garbage(tmp_path: Path, choose: Chooser) -> None:
    """Power goes off at each step of recycling. The manifest names neither file then; but what *is* a good header under the
    new name is the new segment, without a frame."""
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
def test_damage_to_what_a_later_commit_vouches_for_is_corruption(transactions: list[Transaction], seed: int) -> None:
    """The other side of the verdict: no crash, but a sector of a synced transaction goes bad, and one more commit follows."""
    with tempfile.TemporaryDirectory() as root:
        disk = CrashDisk(root)
        written = Written(disk, root)
        with written.file as file:
            written.run([*(Transaction(pages=each.pages) for each in transactions), Transaction(pages=((0, 1),))])
            geometry = file.header.geometry
            victim = random.Random(seed).randrange(written.ends[-2])
            live = disk.open(written.path)
            position = geometry.frame_offset(victim) + seed % 64
            live.write_at(bytes([live.read_at(1, position)[0] ^ 0x10]), position)
            live.close()
            with pytest.raises(Corruption) as caught:
                recover_segment(file)
        assert caught.value.where["frame"] == victim
