"""`tail --follow`: rows that are written as they come, until Ctrl-C.

Rules
  1. A row is written, and flushed, at once: as a line of text under the columns, or as one line of JSON. There is no end that
     an array could be closed at, so the rows are JSON lines.
  2. Ctrl-C and SIGTERM end it well, with code 0, as they end every command that stays.
  3. A reader that closes the pipe ends it too, also while nothing comes: whoever reads `| head -1` does not wait for a second
     row.

Threads: the main one.
"""

from __future__ import annotations

import select
import sys
import time
from collections.abc import Callable, Iterable, Sequence

from quire.cli.command import Cli, Verdict, unwritable
from quire.cli.exit_codes import OK
from quire.cli.job_progress import until_interrupted
from quire.cli.output import Look, Row, json_line
from quire.cli.tables import RunningTable

LOOK_SECONDS = 0.1
"""How often it is looked whether something is new."""


def follow(cli: Cli, columns: Sequence[str], new: Callable[[], Iterable[Row]]) -> Verdict:
    """Write the rows that `new` gives, again and again: each call has those since the one before."""
    table = None if cli.as_json else RunningTable(columns, Look.of(sys.stdout))
    with until_interrupted() as ending:
        while not ending.is_set():  # not `wait`: the handler that sets it runs in this very thread
            for row in new():
                _write(json_line(row.data) if table is None else table.lines(row.cells))
                if ending.is_set():
                    break
            _see_who_reads()
            time.sleep(LOOK_SECONDS)
    return Verdict(None, OK)


def _write(text: str) -> None:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise unwritable(error) from error


def _see_who_reads() -> None:
    """End the command when the reader of the pipe has gone, also while nothing comes (rule 3)."""
    try:
        number = sys.stdout.fileno()
    except OSError:
        return  # no file: a test reads it
    poll = select.poll()
    poll.register(number, 0)
    if any(event & select.POLLERR for _, event in poll.poll(0)):
        raise BrokenPipeError
