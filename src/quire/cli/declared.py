"""Commands as they are declared: a function whose signature says what it takes, a name, an example.

Terms
  command     a function (see `quire.cli.command`) with a name, the example that ends its help, and its store unless told
  group       commands under a common first word; the program itself is one
  parameter   what a command takes: an argument, or an option; its type is one of `KINDS`, a list of one, or one or nothing

Rules
  1. A declaration is the only place that says how a command is called: `quire.cli.lane` reads command lines by it, and
     `quire.cli.typed` makes typer's help, errors and completion of it. The keywords are typer's.
  2. Importing a module with declarations does not load what its commands work with: no typer, no msgspec, no store (a test
     looks at each of them).

Any thread: declarations do not change once they are made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec

from quire.cli.command import HERE, STORE_VARIABLE, Cli, Verdict
from quire.cli.output import Shown
from quire.cli.values import Value

P = ParamSpec("P")
Body = Callable[Concatenate[Cli, P], Shown | Verdict]

KINDS = (str, int, float, bool)
HELP = ("-h", "--help")
"""How help is asked for, of every command and every group."""
REQUIRED = ...
"""The default of a parameter that has none."""


class Argument:
    """A word that a command takes by its place."""

    names: tuple[str, ...] = ()

    def __init__(self, **said: Any) -> None:
        self.said = said


class Option(Argument):
    """What a command takes by its name: `Option("--limit", "-n", min=0)`; unnamed it is called as the parameter."""

    def __init__(self, *names: str, **said: Any) -> None:
        super().__init__(**said)
        self.names = names


class Parameter(Value):
    """What a command takes."""

    name: str
    kind: type
    many: bool
    default: Any
    declared: Argument

    @property
    def names(self) -> tuple[str, ...]:
        """How an option is written; nothing for an argument."""
        named = isinstance(self.declared, Option)
        return self.declared.names or ((f"--{self.name.replace('_', '-')}",) if named else ())


class Command(Value):
    """A function as a command."""

    name: str
    body: Callable[..., Any]
    example: str
    store: str

    def parameters(self) -> list[Parameter]:
        """What its function takes after the `Cli`, in order."""
        code = self.body.__code__
        names = code.co_varnames[1 : code.co_argcount]
        defaults = self.body.__defaults__ or ()
        at = len(names) - len(defaults)
        return [
            _parameter(name, self.body, REQUIRED if place < at else defaults[place - at])
            for place, name in enumerate(names)
        ]

    def shared(self) -> list[Parameter]:
        """What every command takes: where the store is, and how to tell what happens."""
        shown = "this directory" if self.store == HERE else self.store
        where = Option(
            "--store", "-s", envvar=STORE_VARIABLE, metavar="DIR", help="The store's directory.", show_default=shown
        )
        return [
            Parameter("store", str, False, self.store, where),
            Parameter("as_json", bool, False, False, Option("--json", help="Write JSON (its shape: docs/cli.md).")),
            Parameter("debug", bool, False, False, Option("--debug", help="Show the traceback of an error.")),
        ]


class Group:
    """Commands, and groups of them, by their words; `text` begins its help."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.commands: dict[str, Command] = {}
        self.groups: dict[str, Group] = {}

    def add(self, name: str, group: Group) -> None:
        """Put a group into this one."""
        self.groups[name] = group

    def find(self, words: Sequence[str]) -> tuple[Command, int] | None:
        """The command that a command line begins with, and how many words name it."""
        if not words:
            return None
        if (inner := self.groups.get(words[0])) is not None:
            found = inner.find(words[1:])
            return (found[0], found[1] + 1) if found else None
        command = self.commands.get(words[0])
        return (command, 1) if command else None


def command(group: Group, name: str, *, example: str, store: str = HERE) -> Callable[[Body[P]], Body[P]]:
    """Declare a function as a command of `group`; `example` ends its help, `store` is where it goes unless told."""

    def register(body: Body[P]) -> Body[P]:
        group.commands[name] = Command(name, body, example, store)
        return body

    return register


def _parameter(name: str, body: Callable[..., Any], default: Any) -> Parameter:
    annotated = body.__annotations__[name]
    if isinstance(
        annotated, str
    ):  # they are texts in all of our modules; evaluated here, because inspect is slow to load
        annotated = eval(annotated, body.__globals__)
    (declared,) = annotated.__metadata__
    kind, many = _kind_of(annotated.__origin__)
    return Parameter(name, kind, many, default, declared)


def _kind_of(declared: Any) -> tuple[type, bool]:
    """`list[int] | None` → `int`, and that there may be many."""
    kinds = [each for each in getattr(declared, "__args__", ()) if each is not type(None)]
    if getattr(declared, "__origin__", None) is list:
        return kinds[0], True
    if kinds:
        (inner,) = kinds
        return _kind_of(inner)
    if declared not in KINDS:
        raise TypeError(f"a command takes {declared!r}")
    return declared, False
