"""The command `completion`: prints or installs the script with which a shell requests completions (`cli/candidates.py`)."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click

from quire.cli.candidates import SHELLS
from quire.cli.declarations import COMPLETING, Argument, Option, command
from quire.cli.errors import OK
from quire.cli.output import CliResult, Note
from quire.core.errors import InvalidInput, StorageFault

if TYPE_CHECKING:
    from quire.cli.command import Cli


@command("completion", example="quire completion bash")
def completion(
    cli: Cli,
    shell: Annotated[
        str, Argument(metavar="[SHELL]", help="The shell: bash, zsh or fish.", show_default="default: $SHELL")
    ] = "",
    install: Annotated[bool, Option("--install", help="Set it up for new shells, instead of printing it.")] = False,
) -> Note | CliResult:
    """Print a shell completion script, or install it.

    `quire completion --install` writes the script to ~/.config/quire and one line to ~/.bashrc or ~/.zshrc that reads it; for
    fish it is one file. Running it again only updates the script. To set it up by hand, add `eval "$(quire completion bash)"`
    to ~/.bashrc.
    """
    shell = shell or os.path.basename(os.environ.get("SHELL", ""))
    if shell not in SHELLS:
        raise InvalidInput("completion does not support this shell", hint="choose bash, zsh or fish", shell=shell)
    script = SHELLS[shell](click.Command("quire"), {}, "quire", COMPLETING).source()
    if install:
        return _installed(shell, script)
    if cli.as_json:
        return Note(text="", data={"shell": shell, "script": script})
    sys.stdout.write(script)
    return CliResult(None, OK)


def _installed(shell: str, script: str) -> Note:
    """Write the script, and make new shells read it."""
    config = Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser()
    file = config / ("fish/completions/quire.fish" if shell == "fish" else f"quire/completion.{shell}")
    start = None if shell == "fish" else Path("~/.bashrc" if shell == "bash" else "~/.zshrc").expanduser()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(script, "utf-8")
        if start is not None:
            line = f"[ -f {shlex.quote(str(file))} ] && . {shlex.quote(str(file))}  # completion of quire"
            before = start.read_text("utf-8") if start.exists() else ""
            if line not in before.splitlines():
                gap = "" if before.endswith("\n") or not before else "\n"
                with start.open("a", encoding="utf-8") as startup:  # appended: the user's own lines are never rewritten
                    startup.write(f"{gap}{line}\n")
    except (OSError, UnicodeDecodeError) as error:
        hint = "`quire completion SHELL` prints the script, to be set up by hand"
        raise StorageFault(f"completion could not be installed: {error}", hint=hint) from None
    read_by = f", which {start} reads" if start is not None else ""
    data = {"shell": shell, "file": str(file), "startup": str(start) if start is not None else None}
    return Note(text=f"wrote {file}{read_by}; open a new {shell} to use it", data=data)
