"""Trees as people see them, drawn by rich. Importing this module loads it.

Rules
  1. As all text (`quire.cli.output`): as wide as the terminal, whole lines where there is none, colours only if wanted, and
     nothing in a name moves the cursor.
  2. A tree that is too deep for the terminal keeps its shape, and its lines are longer.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from io import StringIO
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text
from rich.tree import Tree as RichTree

from quire.cli.output import Tree, wrapped
from quire.cli.plain import visible

if TYPE_CHECKING:
    from quire.cli.output import Look, Node

GUIDE_COLUMNS = 4
LABEL_COLUMNS_MIN = 40
"""Room that a label has at any depth (rule 2)."""

NO_LIMIT = 100_000
"""Columns of what is no terminal."""


class _Paper(StringIO):
    """Takes the drawing; says the encoding of what it is for, so that lines are drawn with what that can show."""

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return sys.stdout.encoding or "utf-8"


def tree_lines(tree: Tree, look: Look) -> Iterator[str]:
    """The lines of a tree."""
    if not tree.roots:
        yield visible(tree.empty)
        return
    for root in tree.roots:
        picture, depth = drawn(root)
        paper = _Paper()
        console = Console(
            file=paper,
            width=max(look.width, depth * GUIDE_COLUMNS + LABEL_COLUMNS_MIN) if look.width else NO_LIMIT,
            color_system="standard" if look.colours else None,
            force_terminal=look.colours,
            highlight=False,
            markup=False,
            emoji=False,
        )
        console.print(picture, soft_wrap=not look.width)
        for line in paper.getvalue().splitlines():
            yield line.rstrip()
    if tree.closing:
        yield ""
        for line in tree.closing.splitlines():
            yield from wrapped(visible(line), look.width)


def drawn(root: Node) -> tuple[RichTree, int]:
    """The node for rich, and how deep it is. No recursion: forks of forks may be many deep."""
    picture = RichTree(_label(root), guide_style="dim")
    todo = [(root, picture, 1)]
    depth = 0
    while todo:
        node, place, level = todo.pop()
        depth = max(depth, level)
        todo += [(each, place.add(_label(each)), level + 1) for each in node.below]
    return picture, depth


def _label(node: Node) -> Text:
    label = Text(visible(node.name), style="dim" if node.faded else "bold")
    if node.text:
        label.append("  " + visible(node.text), style="dim" if node.faded else "not bold")
    return label
