"""The options of a data source: text from people, read and checked.

Rules
  1. An option that a source does not know is an error, not something to pass over: a misspelt `snapshot` would read another
     version than was meant.
  2. Names are case-insensitive, as everywhere in Spark.

    >>> given = Options({"Store": "/data", "LIMIT": "7"}, source="quire.table", known=("limit",))
    >>> given.number("limit", 1), given.text("table")
    (7, '')

Importable on executors. Raises `InvalidInput`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from quire.core.errors import InvalidInput
from quire.spark.access import Access, access_of

COMMON = ("store", "path", "token", "token_file", "tls_ca_file")


class Options:
    """See the rules above."""

    def __init__(self, given: Mapping[str, str], *, source: str, known: Iterable[str]) -> None:
        self._given = {name.lower(): value for name, value in given.items()}
        self._source = source
        allowed = {*COMMON, *known}
        if unknown := sorted(self._given.keys() - allowed):
            hint = f"options: {', '.join(sorted(allowed - {'path', 'token'}))}"
            raise InvalidInput(f"{source} has no such option", hint=hint, options=unknown)

    def access(self) -> Access:
        """How to reach the owner."""
        return access_of(self._given)

    def text(self, name: str, default: str = "") -> str:
        """An option as it is."""
        return self._given.get(name, default)

    def need(self, name: str) -> str:
        """An option that must be given."""
        if not (value := self.text(name)):
            raise InvalidInput(f"{self._source} needs the option `{name}`", hint=f'.option("{name}", …)')
        return value

    def names(self, name: str) -> list[str]:
        """A list with commas; empty if it is not given."""
        return [part for each in self.text(name).split(",") if (part := each.strip())]

    def number(self, name: str, default: int, *, least: int = 0) -> int:
        """A whole number."""
        text = self.text(name)
        if not text:
            return default
        if not text.strip().isdecimal() or int(text) < least:
            raise InvalidInput(f"the option `{name}` is a whole number from {least} on", given=text)
        return int(text)

    def one_of(self, name: str, choices: tuple[str, ...]) -> str:
        """One of some words; the first is the default."""
        given = self.text(name, choices[0]).lower()
        if given not in choices:
            raise InvalidInput(f"the option `{name}` is one of {', '.join(choices)}", given=given)
        return given
