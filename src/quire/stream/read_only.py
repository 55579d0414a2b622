"""A stream of a store that was opened for reading: alongside its owner, on a standby, or in a restored directory.

It has the reading methods of `Stream`, over the files of the stream (`file_reader.py`); methods that change something raise
`ReadOnly`. Other processes may write, seal, compress, upload and evict meanwhile.

Threads: any. Raises: `ReadOnly`, and what reading raises."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, cast

from quire.core.errors import QuireError, StoreClosed, UnknownCursor
from quire.core.read_only import OwnerOnly, refuse
from quire.core.settings import StreamSettings
from quire.durable.names import Tier
from quire.manifest.store import ManifestStore
from quire.stream.file_reader import StreamFileReader
from quire.stream.files import StreamFiles
from quire.stream.mlog_modes import Mode
from quire.stream.remote_read import SharedSegment
from quire.stream.state import Consumer, Retention, load_state
from quire.stream.stream import Stream, StreamInfo

if TYPE_CHECKING:
    from quire.objects.api import ObjectStore


class ReadOnlyStream(Stream):
    """A stream opened for reading, as `store.stream(name)` returns it in a store with mode "r"."""

    def __init__(  # does not call the base class: parts that only the owner has are replaced by `OwnerOnly`
        self,
        manifest: ManifestStore,
        db: int | str,
        files: Callable[[int], StreamFiles],
        store: Callable[[], ObjectStore],
        settings: StreamSettings,
    ) -> None:
        reader = StreamFileReader(manifest, db, files, store)
        self.files, self.stream_id = reader.files, reader.stream_id
        self.torn_bytes = 0
        self._store = store
        self._settings = settings
        self._refused = OwnerOnly("the stream", stream=reader.name)
        self._reader = cast(Any, reader)
        self._state = cast(Any, _ReadState(reader))
        self.hot = self.ledger = self.tiers = self.upkeep = cast(Any, self._refused)
        self._failure: StoreClosed | None = None

    def segments(self) -> Iterable[SharedSegment]:
        """Return the segments, as other processes read them."""
        return cast(StreamFileReader, self._reader).contents().segments

    @property
    def mode(self) -> Mode:
        """The mode of the manifest log when the stream was last open."""
        return Mode(load_state(self.files).mode)

    @property
    def retention(self) -> Retention:
        """The retention in effect: the stream's own, or the store's."""
        settings = self._settings
        own = load_state(self.files).retention
        return own or Retention(seconds=settings.retain_seconds, bytes=settings.retain_bytes)

    def info(self) -> StreamInfo:
        """Return statistics of the stream, from LMDB and the directories."""
        contents, disk, files = cast(StreamFileReader, self._reader).contents(), self.files.disk, self.files
        sizes = {
            tier: [disk.size(files.segment(tier, number)) for number in files.segments(tier)]
            for tier in (Tier.HOT, Tier.WARM)
        }
        return StreamInfo(
            stream_id=self.stream_id,
            first_record=contents.first_record,
            end_record=contents.end_record,
            segments=len(contents.segments),
            hot_segments=len(sizes[Tier.HOT]),
            hot_bytes=sum(sizes[Tier.HOT]),
            warm_segments=len(sizes[Tier.WARM]),
            warm_bytes=sum(sizes[Tier.WARM]),
            remote_segments=sum(bool(segment.key) for segment in contents.segments),
            remote_bytes=0,
            mode=self.mode.value,
            consumers=self.consumers,
            retention=self.retention,
            torn_bytes=0,
            gaps=tuple(contents.gaps),
        )

    # ── closing ───────────────────────────────────────────────────────────────────────────────────────────────────────
    @property
    def failure(self) -> QuireError | None:
        """`StoreClosed` after `close`; otherwise `None`."""
        return self._failure

    def close(self) -> None:
        """Close the stream, and end waiting readers. Closing twice is allowed."""
        self._failure = StoreClosed("the stream is closed", hint="open it again", stream_id=self.stream_id)
        cast(StreamFileReader, self._reader).close()

    abandon = close
    forked = close


class _ReadState:
    """Consumers and their positions, as written by the owner."""

    def __init__(self, reader: StreamFileReader) -> None:
        self._reader = reader

    @property
    def stored(self) -> Any:
        return load_state(self._reader.files)

    def position(self, name: str) -> int:
        """Return the position of a consumer."""
        consumers: dict[str, Consumer] = self.stored.consumers
        if name not in consumers:
            raise UnknownCursor(
                "the stream has no such consumer", hint="register it in the process that owns the store", name=name
            )
        return consumers[name].position

    def __getattr__(self, name: str) -> Any:
        refuse("the stream", stream=self._reader.name)
