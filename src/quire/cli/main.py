"""The program `quire`: from a command line to an exit code.

Threads: the main one.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence

from quire.cli.app import Program
from quire.cli.command import COMPLETING, output_for, pipe_closed, tell, unwritable
from quire.cli.declarations import run as run_command_line
from quire.cli.exit_codes import INTERRUPTED

GARBAGE_ALLOCATIONS = 50_000
"""Allocations between two looks for garbage. Python's own 700 are passed a hundred times while modules are loaded, of which
nothing is ever garbage."""


def main() -> None:
    """What the console script and `python -m quire` run."""
    gc.set_threshold(GARBAGE_ALLOCATIONS)
    _see_to_streams()
    code = run(sys.argv[1:])
    gc.freeze()  # Python looks through everything again while it ends: a tenth of a short command
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    """Run a command line; its exit code."""
    try:
        if instruction := os.environ.get(COMPLETING):
            from quire.cli.completion import answer  # reads stores, which help does not

            return answer(Program(), instruction)
        code = run_command_line(Program(), arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        return pipe_closed()
    except OSError as error:  # click was writing its help; commands tell such errors themselves
        return tell(output_for("--json" in arguments), unwritable(error))
    except KeyboardInterrupt:
        return INTERRUPTED


def _see_to_streams() -> None:
    """A stream the caller closed is one nobody reads: else the next file opened would get its number, and our words."""
    for name, number, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - it lives as long as we do
        elif number:
            stream.reconfigure(errors="backslashreplace")  # a path need not be text
