"""Changes values in a quire.toml and preserves everything else as the user wrote it: order, comments, whitespace.

A comment line with the same key (as `quire init` writes them) becomes the setting. A file whose syntax this module does not
handle (dotted keys, inline tables) is refused, not rewritten: the result is parsed again and compared.

Pure functions of text, except for `change_config`. Raises `InvalidConfig`, and the errors of the disk.
"""

from __future__ import annotations

import os
import re

import msgspec

from quire.core.errors import InvalidConfig
from quire.core.settings import load
from quire.durable import names
from quire.durable.files import Disk, read_all, write_atomic

_HEADER = re.compile(r"\s*\[")
Value = str | bool


def change_config(disk: Disk, root: str, changes: dict[tuple[str, str], Value]) -> None:
    """Set (section, key) → value in a store's quire.toml. The section of a top-level key is empty."""
    path = os.path.join(root, names.CONFIG)
    before = read_all(disk, path).decode()
    text = before
    for (section, key), value in changes.items():
        text = with_setting(text, section, key, value)
    if text != before:
        write_atomic(disk, path, text.encode())


def with_setting(text: str, section: str, key: str, value: Value) -> str:
    """Return the text with a key of a section set.

    >>> print(with_setting('[archive]\\n# mode = "off"  # or async\\n', "archive", "mode", "async"), end="")
    [archive]
    mode = "async"  # or async
    >>> print(with_setting('object_store = "x"\\n', "archive", "mode", "sync"), end="")
    object_store = "x"
    <BLANKLINE>
    [archive]
    mode = "sync"
    """
    lines = text.splitlines()
    begin, end = _section(lines, section)
    written = f"{key} = {_toml(value)}"
    if begin is None:
        lines += ["", f"[{section}]", written]
    else:
        at = _line_of(lines, begin, end, key)
        if at is None:
            lines.insert(begin, written)
        else:
            lines[at] = written + _comment(lines[at])
    edited = "\n".join(lines) + "\n"
    wanted = _with(_plain(text), section, key, value)
    try:
        is_right = _plain(edited) == wanted
    except InvalidConfig:
        is_right = False
    if not is_right:
        where = f"[{section}]" if section else "the top"
        raise InvalidConfig(
            "quire.toml is written in a way that cannot be edited automatically",
            hint=f"set `{written}` in {where} of quire.toml by hand",
        )
    return edited


def _section(lines: list[str], section: str) -> tuple[int | None, int]:
    """Return (first line after the header, first line of the next section); the first is `None` if there is no such section."""
    begin: int | None = None if section else 0
    for number, line in enumerate(lines):
        if _HEADER.match(line):
            if begin is not None:
                return begin, number
            if re.fullmatch(rf"\s*\[\s*{re.escape(section)}\s*\]\s*(#.*)?", line):
                begin = number + 1
    return begin, len(lines)


def _line_of(lines: list[str], begin: int, end: int, key: str) -> int | None:
    """Return the number of the line that sets the key, else of the comment that has it."""
    for pattern in (rf"\s*{re.escape(key)}\s*=", rf"\s*#\s*{re.escape(key)}\s*="):
        for number in range(begin, end):
            if re.match(pattern, lines[number]):
                return number
    return None


def _comment(line: str) -> str:
    """Return the comment after the value of a line, with the space before it; empty if there is none."""
    match = re.match(r"""\s*#?\s*\w+\s*=\s*(?:"(?:\\.|[^"\\])*"|'[^']*'|[^\s#"']+)(\s*#.*)?$""", line)
    return match[1] if match is not None and match[1] else ""


def _toml(value: Value) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _plain(text: str) -> dict[str, object]:
    plain: dict[str, object] = msgspec.to_builtins(load(text.encode()))
    return plain


def _with(settings: dict[str, object], section: str, key: str, value: Value) -> dict[str, object]:
    if not section:
        return {**settings, key: value}
    inner = settings[section]
    assert isinstance(inner, dict)
    return {**settings, section: {**inner, key: value}}
