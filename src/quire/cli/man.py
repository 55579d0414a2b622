"""Generates man pages of all commands from the same declarations as `--help`: `python -m quire.cli.man [DIR]`.

There is one page for the program and one for each command, such as `quire-snapshot-create.1`. DIR is a directory man1, by
default the user's own (`~/.local/share/man/man1`), where `man quire` finds it. The pages of one version are always the same
bytes.

Pure functions, except for `main`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path

import click

from quire.cli.declarations import HELP
from quire.cli.errors import EXITS, OK, PROBLEMS
from quire.cli.main import Program

HOME = "~/.local/share/man/man1"


def main(arguments: list[str]) -> int:
    """Write the pages and return the exit code."""
    folder = Path(arguments[0] if arguments else HOME).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    written = pages()
    for name, text in written.items():
        (folder / name).write_text(text, "utf-8")
    sys.stdout.write(f"wrote {len(written)} pages to {os.fspath(folder)}\n")
    return 0


def pages() -> Mapping[str, str]:
    """Return file name → page for all commands."""
    program = Program().load_all()
    pages = {"quire.1": _page(["quire"], program)}
    for words, command in _commands(["quire"], program):
        pages[f"{'-'.join(words)}.1"] = _page(words, command)
    return pages


def _commands(words: list[str], group: click.Group) -> Iterator[tuple[list[str], click.Command]]:
    for name in group.list_commands(click.Context(group)):
        command = group.get_command(click.Context(group), name)
        assert command is not None, "it was listed"
        yield [*words, name], command
        if isinstance(command, click.Group):
            yield from _commands([*words, name], command)


def _page(words: list[str], command: click.Command) -> str:
    # Click keeps the help option of a command from its first context, so this one has the names that commands have.
    context = click.Context(command, info_name=" ".join(words), help_option_names=list(HELP))
    summary = " ".join((command.help or "").partition("\n\n")[0].split())
    lines = [
        f'.TH "{"-".join(words).upper()}" 1 "" "quire {version("quire")}" "quire"',
        ".SH NAME",
        f"{_text('-'.join(words))} \\- {_text(summary.rstrip('.'))}",
        ".SH SYNOPSIS",
        f".B {_text(' '.join(words))}",
        _text(" ".join(command.collect_usage_pieces(context))),
    ]
    if paragraphs := [" ".join(part.split()) for part in (command.help or "").split("\n\n")[1:]]:
        lines += [".SH DESCRIPTION", *(line for part in paragraphs for line in (".PP", _text(part)))]
    if isinstance(command, click.Group):
        lines.append(".SH COMMANDS")
        for name in command.list_commands(context):
            member = command.get_command(context, name)
            lines += [".TP", f".B {_text(name)}", _text(member.get_short_help_str(200) if member is not None else "")]
    records = [record for parameter in command.get_params(context) if (record := _record(parameter, context))]
    if records:
        lines.append(".SH OPTIONS")
        for left, right in records:
            lines += [".TP", f".B {_text(left)}", _text(right)]
    codes = {OK: "done", PROBLEMS: "a check found problems, or confirmation was refused"}
    codes |= {entry.code: entry.meaning for entry in EXITS}
    lines.append(".SH EXIT STATUS")
    for code, meaning in codes.items():
        lines += [".TP", f".B {code}", _text(meaning)]
    if command.epilog:
        lines += [".SH EXAMPLE", _text(command.epilog.removeprefix("Example: "))]
    group = "quire" if len(words) < 3 else "-".join(words[:-1])
    if len(words) > 1:
        lines += [".SH SEE ALSO", f".BR {_text(group)} (1)"]
    return "\n".join(lines) + "\n"


def _record(parameter: click.Parameter, context: click.Context) -> tuple[str, str] | None:
    """Return an option or argument with its help, `None` if it is hidden."""
    if isinstance(parameter, click.Argument):
        return str(parameter.make_metavar(context)), str(getattr(parameter, "help", "") or "")
    return parameter.get_help_record(context)


def _text(text: str) -> str:
    """Escape a line of text for roff, so that nothing in it is a command and hyphens stay hyphens.

    >>> print(_text(".x -a 'b' \\\\n"))
    \\&.x \\-a 'b' \\en
    """
    escaped = text.replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{escaped}" if escaped.startswith((".", "'")) else escaped


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
