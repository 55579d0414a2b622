"""The command that prints what a shell needs to complete the words of `quire`."""

from __future__ import annotations

import sys
from typing import Annotated

from quire.cli.app import Program
from quire.cli.command import Cli, Verdict
from quire.cli.completion import SHELLS, script
from quire.cli.declarations import Argument, Group, command
from quire.cli.exit_codes import OK
from quire.cli.output import Note
from quire.core.errors import InvalidInput


def add_to(app: Group) -> None:
    """Register this command."""
    command(app, "completion", example="quire completion bash")(completion)


def completion(
    cli: Cli, shell: Annotated[str, Argument(metavar="SHELL", help="The shell: bash, zsh or fish.")]
) -> Note | Verdict:
    """Print the completion script of a shell.

    Put `eval "$(quire completion bash)"` into ~/.bashrc, the same with zsh into ~/.zshrc; for fish write the output to
    ~/.config/fish/completions/quire.fish.
    """
    if shell not in SHELLS:
        raise InvalidInput("there is no completion for this shell", hint="choose bash, zsh or fish", shell=shell)
    text = script(Program(), shell)
    if cli.as_json:
        return Note(text="", data={"shell": shell, "script": text})
    sys.stdout.write(text)
    return Verdict(None, OK)
