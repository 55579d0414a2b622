"""What the JVM of a session says on standard error, passed on; but for one thing that means nothing.

Spark closes the socket of a Python worker that was idle for a minute. If that is a Unix socket, the worker meets a broken pipe
where it would have met the end of a file, and pyspark's daemon prints the stack. `daemon.py` keeps ours from it; workers that
plan (the ones that look data sources up, say) have pyspark's own daemon, whatever a session's settings are.

Rules
  1. Everything else is passed on as it comes, also what ends without a line break. What may yet become the stack is held back
     until it is known: the next line says it.
  2. It goes to where this process's standard error goes by then. If that is closed, it goes nowhere: the JVM is not
     held up.

Threads: one of its own, for each JVM that is started, until that has ended.
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


class Unsaid:
    """Leaves the stack out of a text that comes in pieces (rule 1).

    >>> unsaid = Unsaid()
    >>> unsaid.heard(b"one\\nTrace"), unsaid.heard(b"d two"), unsaid.rest()
    (b'one\\n', b'Traced two', b'')
    """

    def __init__(self) -> None:
        self._held: list[bytes] = []
        """Lines that may be the beginning of the stack."""
        self._part = b""
        """The beginning of a line that may belong to it."""

    def heard(self, piece: bytes) -> bytes:
        """What of it, and of what was held back, is to be passed on now."""
        *lines, self._part = (self._part + piece).split(b"\n")
        said = b"".join(self._line(line + b"\n") for line in lines)
        if self._held or BEGIN.startswith(self._part):
            return said
        return said + self._taken()

    def rest(self) -> bytes:
        """What is still held back when nothing more comes."""
        held, self._held = b"".join(self._held), []
        return held + self._taken()

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

    def _taken(self) -> bytes:
        part, self._part = self._part, b""
        return part


def launch(settings: dict[str, str]) -> None:
    """Start the JVM of this process, if it has none yet, and pass on what it says."""
    from pyspark import SparkConf, SparkContext
    from pyspark.java_gateway import launch_gateway

    context: Any = SparkContext
    if context._gateway is not None or "PYSPARK_GATEWAY_PORT" in os.environ:  # `spark-submit` has started it
        return
    conf = SparkConf().setAll(list(settings.items()))
    heard, said = os.pipe()
    threading.Thread(target=_pass_on, args=(heard,), name="quire-spark-stderr", daemon=True).start()
    try:
        gateway = launch_gateway(conf, {"stderr": said})  # type: ignore[no-untyped-call]
    finally:
        os.close(said)
    context._ensure_initialized(gateway=gateway, conf=conf)


def _pass_on(heard: int) -> None:
    unsaid = Unsaid()
    while piece := os.read(heard, READ_BYTES):
        _say(unsaid.heard(piece))
    _say(unsaid.rest())
    os.close(heard)


def _say(text: bytes) -> None:
    with suppress(OSError):  # rule 2
        while text:
            text = text[os.write(2, text) :]
