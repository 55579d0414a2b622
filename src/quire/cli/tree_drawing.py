"""Trees as people see them.

Rules
  1. As all text (`quire.cli.output`): as wide as the terminal, whole lines where there is none, colours only if wanted, and
     nothing in a name moves the cursor.
  2. A tree that is too deep for the terminal keeps its shape, and its lines are longer.
  3. Lines are drawn with what the output's encoding can show.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from quire.cli.formatting import visible
from quire.cli.output import Tree, wrapped

if TYPE_CHECKING:
    from quire.cli.output import Look, Node

LABEL_COLUMNS_MIN = 40
"""Room that a label has at any depth (rule 2)."""

GUIDES = ("├── ", "└── ", "│   ", "    ")
GUIDES_ASCII = ("+-- ", "`-- ", "|   ", "    ")
"""Before a node, before the last one, and what stands below each of them."""


def tree_lines(tree: Tree, look: Look) -> Iterator[str]:
    """The lines of a tree."""
    if not tree.roots:
        yield visible(tree.empty)
        return
    guides = GUIDES if _shows("├─└│") else GUIDES_ASCII
    for root in tree.roots:
        yield from _drawn(root, look, guides)
    if tree.closing:
        yield ""
        for line in tree.closing.splitlines():
            yield from wrapped(visible(line), look.width)


def _shows(text: str) -> bool:
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _drawn(root: Node, look: Look, guides: tuple[str, str, str, str]) -> Iterator[str]:
    """No recursion: forks of forks may be many deep."""
    node, last, below_node, below_last = guides
    todo: list[tuple[Node, str, str]] = [(root, "", "")]
    while todo:
        each, before, below = todo.pop()
        yield from _label(each, before, below + (below_node if each.below else ""), look)
        children = list(each.below)
        for child in reversed(children):
            is_last = child is children[-1]
            todo.append((child, below + (last if is_last else node), below + (below_last if is_last else below_node)))


def _label(each: Node, before: str, below: str, look: Look) -> Iterator[str]:
    name = visible(each.name)
    text = f"{name}  {visible(each.text)}" if each.text else name
    room = look.width - max(len(before), len(below))
    first, *others = wrapped(text, max(room, LABEL_COLUMNS_MIN) if look.width else 0)
    head = look.styled(before, "2") if before else ""
    if each.faded:
        yield head + look.styled(first, "2")
    else:
        yield head + look.styled(first[: len(name)], "1") + first[len(name) :]
    for other in others:
        yield look.styled(below, "2") + (look.styled(other, "2") if each.faded else other)
