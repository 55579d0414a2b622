"""Forwards the standard error of a session's JVM, except for one harmless traceback.

Spark closes the socket of a Python worker that was idle for a minute. If it is a Unix socket, the worker gets a broken pipe
instead of an end of file, and pyspark's daemon prints the stack. `daemon.py` prevents that for our workers; workers that plan
(those that look up data sources, for example) use pyspark's own daemon, whatever a session's settings are.

Everything else is forwarded as it arrives, including text without a line break, to the current standard error of this
process.

Threads: one for each JVM that is started, until it has ended.
"""

from __future__ import annotations

import os
import re
import threading
from contextlib import suppress
from typing import Any

BEGIN = b"Traceback (most recent call last):\n"
FRAME = re.compile(rb'  File "[^"]*pyspark[^"]*daemon\.py", line \d+, in (manager|worker)\n|    .*\n')
"""A frame of the daemon, or a line that shows its source."""
END = b"BrokenPipeError: [Errno 32] Broken pipe\n"

READ_BYTES = 1 << 16


class TracebackFilter:
    """Removes the stack from a text that arrives in pieces. Its possible beginning is held back until the next line decides.

    >>> log = TracebackFilter()
    >>> log.feed(b"one\\nTrace"), log.feed(b"d two"), log.rest()
    (b'one\\n', b'Traced two', b'')
    """

    def __init__(self) -> None:
        self._held: list[bytes] = []
        """Lines that may be the beginning of the stack."""
        self._part = b""
        """The beginning of a line that may belong to it."""

    def feed(self, piece: bytes) -> bytes:
        """Add a piece; return the text to forward now, including text that was held back."""
        *lines, self._part = (self._part + piece).split(b"\n")
        output = b"".join(self._line(line + b"\n") for line in lines)
        if self._held or BEGIN.startswith(self._part):
            return output
        return output + self._take_part()

    def rest(self) -> bytes:
        """Return the text that is still held back, at the end of the input."""
        held, self._held = b"".join(self._held), []
        return held + self._take_part()

    def _line(self, line: bytes) -> bytes:
        if self._held and FRAME.fullmatch(line):
            self._held.append(line)
            return b""
        if len(self._held) > 1 and line == END:
            self._held = []
            return b""
        held, self._held = b"".join(self._held), []
        if line == BEGIN:
            self._held = [line]
            return held
        return held + line

    def _take_part(self) -> bytes:
        part, self._part = self._part, b""
        return part


def launch(settings: dict[str, str]) -> None:
    """Start the JVM of this process, if it has none yet, and forward its standard error."""
    from pyspark import SparkConf, SparkContext, java_gateway

    context: Any = SparkContext
    if context._gateway is not None or "PYSPARK_GATEWAY_PORT" in os.environ:  # `spark-submit` has started it
        return
    conf = SparkConf().setAll(list(settings.items()))
    reading, writing = os.pipe()
    threading.Thread(target=_pass_on, args=(reading,), name="quire-spark-stderr", daemon=True).start()
    try:
        gateway = java_gateway.launch_gateway(conf, {"stderr": writing})  # type: ignore[no-untyped-call]
    finally:
        os.close(writing)
    context._ensure_initialized(gateway=gateway, conf=conf)


def _pass_on(reading: int) -> None:
    log = TracebackFilter()
    while piece := os.read(reading, READ_BYTES):
        _write_stderr(log.feed(piece))
    _write_stderr(log.rest())
    os.close(reading)


def _write_stderr(text: bytes) -> None:
    with suppress(OSError):  # standard error may be closed; the JVM must not block on that
        while text:
            text = text[os.write(2, text) :]
