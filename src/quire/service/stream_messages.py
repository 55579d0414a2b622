"""The actions about streams: where records are, and how far a consumer has read.

Apart from `messages.py`, whose answers are made of a manifest's values: executors ask these, and have none. Records themselves
do not travel here: whoever wants them reads files and objects (`stream/remote_read.py`).

Rules
  1. Registering leaves a consumer that is there where it is; an acknowledgement only moves forward: both may be repeated.
"""

from __future__ import annotations

from quire.service.tickets import Access, Action, Request
from quire.stream.remote_read import SharedStream


class OfStream(Request, frozen=True):
    """`upload`: have the records in objects first, for readers that share no disk."""

    name: str
    start: int | None = None
    stop: int | None = None
    upload: bool = False


class WaitForRecord(Request, frozen=True):
    name: str
    record: int
    seconds: float


class OfConsumer(Request, frozen=True):
    name: str
    consumer: str


class RegisterConsumer(Request, frozen=True):
    """`start`: `oldest`, `latest`, or the id of the first record that it wants."""

    name: str
    consumer: str
    start: int | str = "oldest"


class AckRecords(Request, frozen=True):
    """A consumer has read everything below `position`."""

    name: str
    consumer: str
    position: int


class LogMode(Request, frozen=True):
    """How much manifest logs are believed: `off`, `shadow` or `on`; empty only asks."""

    mode: str = ""


STREAM_LOG_MODE = Action("stream.log_mode", LogMode, str)
STREAM_SHARE = Action("stream.share", OfStream, SharedStream, Access.READ)
STREAM_WAIT = Action("stream.wait", WaitForRecord, int, Access.READ)
STREAM_POSITION = Action("stream.position", OfConsumer, int, Access.READ)
STREAM_REGISTER = Action("stream.register", RegisterConsumer, int)
STREAM_ACK = Action("stream.ack", AckRecords, None)

STREAM_ACTIONS = (STREAM_SHARE, STREAM_WAIT, STREAM_POSITION, STREAM_REGISTER, STREAM_ACK, STREAM_LOG_MODE)
