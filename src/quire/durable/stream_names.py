"""The names of a stream's files beside those of its segments and its manifest log.

The same rules as in `quire.durable.names`, whose neighbour this is: build and parse are inverse, foreign texts are `None`.

Pure functions, any thread; importable on executors. Raises `OutOfRange` for a number that does not fit.

    >>> state_path(7), spare_path(7, 2)
    ('streams/7/stream.json', 'streams/7/hot/spare-2.seg.tmp')
    >>> parse_segment_name("00000000000000ff.seg")
    255
"""

from __future__ import annotations

import re

from quire.core.ids import u64
from quire.durable.names import STREAMS, TEMPORARY, stream_dir

_SEGMENT = re.compile(r"([0-9a-f]{16})\.seg")
_HOME = re.compile("0|[1-9][0-9]{0,19}")


def stream_home(stream_id: int) -> str:
    """Where everything of a stream is."""
    return f"{STREAMS}/{u64('stream_id', stream_id)}"


def state_path(stream_id: int) -> str:
    """What a stream remembers beside its log: consumers, retention, the mode it was last open in."""
    return f"{stream_home(stream_id)}/stream.json"


def spare_path(stream_id: int, number: int) -> str:
    """A file that is to become a segment. Its end says that it is swept when the stream is opened."""
    return f"{stream_dir(stream_id, 'hot')}/spare-{u64('number', number)}.seg{TEMPORARY}"


def parse_segment_name(name: str) -> int | None:
    """The segment whose file has this name in `hot/` or `warm/`; `None` if it is foreign."""
    match = _SEGMENT.fullmatch(name)
    return None if match is None else int(match[1], 16)


def parse_stream_home(name: str) -> int | None:
    """The stream whose directory has this name; `None` if it is foreign."""
    return int(name) if _HOME.fullmatch(name) else None
