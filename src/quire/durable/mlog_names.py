"""The object keys of a stream's manifest log beside those of its chunks: snapshots and bundles.

The same rules as in `quire.durable.names`, whose neighbour this is: build and parse are inverse, foreign texts are `None`.

Pure functions, any thread; importable on executors. Raises `OutOfRange` for a number that does not fit.

    >>> snapshot_key(7, 3), bundle_key(7, 0, 41)
    ('manifest/7/snapshot_3.bin', 'manifest/7/bundle_0_41.mlog')
    >>> parse_bundle_key("manifest/7/bundle_0_41.mlog")
    (7, 0, 41)
"""

from __future__ import annotations

import re

from quire.core.ids import U64_MAX, u64
from quire.durable.names import parse_manifest_log_key

_NUMBER = "(0|[1-9][0-9]{0,19})"
_SNAPSHOT = re.compile(f"manifest/{_NUMBER}/snapshot_{_NUMBER}\\.bin")
_BUNDLE = re.compile(f"manifest/{_NUMBER}/bundle_{_NUMBER}_{_NUMBER}\\.mlog")


def log_prefix(stream_id: int) -> str:
    """What all object keys of a stream's manifest log begin with."""
    return f"manifest/{u64('stream_id', stream_id)}"


def snapshot_key(stream_id: int, snapshot_id: int) -> str:
    """The object key of a snapshot."""
    return f"{log_prefix(stream_id)}/snapshot_{u64('snapshot_id', snapshot_id)}.bin"


def bundle_key(stream_id: int, first: int, last: int) -> str:
    """The object key of a bundle: the chunks `first` to `last` as one object."""
    return f"{log_prefix(stream_id)}/bundle_{u64('first', first)}_{u64('last', last)}.mlog"


def is_log_key(text: str) -> bool:
    """Whether a key is of a manifest log: a chunk, a bundle or a snapshot."""
    parsers = (parse_manifest_log_key, parse_bundle_key, parse_snapshot_key)
    return any(parse(text) is not None for parse in parsers)


def parse_snapshot_key(text: str) -> tuple[int, int] | None:
    """(stream_id, snapshot_id); `None` if it is foreign."""
    match = _SNAPSHOT.fullmatch(text)
    if match is None or max(map(int, match.groups())) > U64_MAX:
        return None
    return int(match[1]), int(match[2])


def parse_bundle_key(text: str) -> tuple[int, int, int] | None:
    """(stream_id, first, last); `None` if it is foreign."""
    match = _BUNDLE.fullmatch(text)
    if match is None or max(map(int, match.groups())) > U64_MAX or int(match[2]) > int(match[3]):
        return None
    return int(match[1]), int(match[2]), int(match[3])
