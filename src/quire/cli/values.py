"""Frozen values for the command line that cost nothing to have: neither dataclasses nor msgspec are loaded for them.

Importing either is more than all that `quire ls` does. A subclass lists its fields, with defaults if they have some, as a
dataclass does:

    >>> class Point(Value):
    ...     x: int
    ...     y: int = 0
    >>> Point(1), Point(1, y=2) == Point(1, 2)
    (Point(x=1, y=0), True)

Any thread: nothing changes.
"""

from __future__ import annotations

from typing import Any, ClassVar, Self, dataclass_transform


@dataclass_transform(frozen_default=True)
class Value:
    """Base of the values; equal if their types and fields are."""

    _names: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, *, kw_only: bool = False) -> None:
        """`kw_only` is for the type checker."""
        cls._names = cls._names + tuple(cls.__dict__.get("__annotations__", ()))  # noqa: RUF063 - inspect is slow to load

    def __init__(self, *given: Any, **named: Any) -> None:
        if len(given) > len(self._names) or named.keys() - set(self._names[len(given) :]):
            raise TypeError(f"{type(self).__name__} has the fields {', '.join(self._names)}, each once")
        fields = dict(zip(self._names, given)) | named
        if missing := [name for name in self._names if name not in fields and not hasattr(type(self), name)]:
            raise TypeError(f"{type(self).__name__} lacks {', '.join(missing)}")
        self.__dict__.update(fields)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__} is frozen")

    def fields(self) -> dict[str, Any]:
        """The fields by their names."""
        return {name: getattr(self, name) for name in self._names}

    def with_(self, **changes: Any) -> Self:
        """This value with other fields."""
        return type(self)(**{**self.fields(), **changes})

    def _tuple(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in self._names)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self._tuple() == other._tuple()

    def __hash__(self) -> int:
        return hash(self._tuple())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in self._names)})"
