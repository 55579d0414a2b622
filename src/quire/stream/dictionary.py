"""Whether a stream's segments are compressed with a dictionary, and with which.

Terms
  plain     what a segment takes without a dictionary
  pays      the segment is at least 5 % smaller with it, the dictionary itself counted: it is part of every file

Rules
  1. It is measured, on a few frames spread over the segment; half of them teach, the others decide.
  2. The dictionary that served the last segment is tried first; a new one is trained when that does not pay any more, and not
     more often than every so many segments: most streams do not profit, and trying costs time.
  3. Ids rise by one; a dictionary never changes.

Threads: belongs to whoever holds the mover's lock. Raises nothing: where training fails there is no dictionary.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.core.limits import KIB
from quire.durable.checksums import Bytes
from quire.stream.segment import BLOCK_HEAD_BYTES, records_of
from quire.stream.segment_scan import Scan
from quire.stream.warm import FRAME_BYTES, LEVEL, NO_DICTIONARY, Dictionary

GAIN_MIN = 0.05
SAMPLE_FRAMES = 8
DICTIONARY_BYTES = 32 * KIB
SAMPLES_MAX = 4_096
"""Records that teach."""
TRY_EVERY = 16
"""Segments between two trainings."""


class Dictionaries:
    """Chooses dictionaries for the segments of one stream."""

    def __init__(self, newest: Dictionary = NO_DICTIONARY, *, next_id: int = 1) -> None:
        self._newest = newest
        self._next_id = max(next_id, newest.id + 1)
        self._since_training = TRY_EVERY

    def choose(self, raw: Bytes, segment: Scan) -> Dictionary:
        """What to compress this segment with."""
        frames = _frames(raw, segment)
        self._since_training += 1
        if self._newest.id and pays(self._newest, frames, segment.cut):
            return self._newest
        if self._since_training < TRY_EVERY or len(frames) < 2:
            return NO_DICTIONARY
        self._since_training = 0
        trained = self._train(raw, segment)
        if trained.id and pays(trained, frames[1::2], segment.cut):
            self._newest, self._next_id = trained, trained.id + 1
            return trained
        return NO_DICTIONARY

    def _train(self, raw: Bytes, segment: Scan) -> Dictionary:
        import zstandard  # loaded with the first segment that is compressed

        samples = _records(raw, segment)
        if len(samples) < 16:
            return NO_DICTIONARY
        try:
            body = zstandard.train_dictionary(DICTIONARY_BYTES, samples, level=LEVEL).as_bytes()
        except zstandard.ZstdError:  # too few, too short, or with nothing in common
            return NO_DICTIONARY
        return Dictionary(self._next_id, body)


def pays(dictionary: Dictionary, frames: Sequence[bytes], segment_bytes: int) -> bool:
    """Whether a segment of which these are samples gets smaller by enough."""
    import zstandard

    total = sum(map(len, frames))
    if not total:
        return False
    plain = zstandard.ZstdCompressor(level=LEVEL)
    taught = zstandard.ZstdCompressor(level=LEVEL, dict_data=zstandard.ZstdCompressionDict(dictionary.body))
    without = sum(len(plain.compress(frame)) for frame in frames) / total * segment_bytes
    with_it = sum(len(taught.compress(frame)) for frame in frames) / total * segment_bytes + len(dictionary.body)
    return with_it <= without * (1 - GAIN_MIN)


def _frames(raw: Bytes, segment: Scan) -> list[bytes]:
    """Samples of what frames will be, spread over the segment."""
    starts = range(0, segment.cut, FRAME_BYTES)
    step = max(len(starts) // SAMPLE_FRAMES, 1)
    return [bytes(memoryview(raw)[start : min(start + FRAME_BYTES, segment.cut)]) for start in starts[::step]]


def _records(raw: Bytes, segment: Scan) -> list[bytes | bytearray | memoryview]:
    """Records of some blocks: not those that decide, as far as there are others."""
    view = memoryview(raw)
    samples: list[bytes | bytearray | memoryview] = []
    step = max(len(segment.blocks) // 64, 1)
    for block in segment.blocks[::step]:
        start = block.offset + BLOCK_HEAD_BYTES
        column = records_of(block, view[start : start + block.body_bytes])
        samples += [record for record in column.slice(0, 64).to_pylist() if record]
        if len(samples) >= SAMPLES_MAX:
            break
    return samples[:SAMPLES_MAX]
