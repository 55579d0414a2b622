"""A quire.toml that says little is read without a parser, and says what the parser would say."""

from __future__ import annotations

import tomllib
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import quire
from quire.core.settings import EXAMPLE, StoreSettings, load
from quire.store.plain_config import SECTIONS, object_store_of

LINES = (
    "",
    "  ",
    "\t",
    "# a comment …",
    "#",
    "# [x]\x00",
    "# \x7f",
    *(f"[{name}]" for name in SECTIONS),
    " [ lsm ]",
    "[lsm] # more",
    "[[lsm]]",
    "[unknown]",
    "[]",
    "[manifest",
    'object_store = "s3://bucket"',
    '  object_store="elsewhere"\t',
    'object_store = ""',
    'object_store = "größe"',
    'object_store = "a\\nb"',
    'object_store = "a"b"',
    'object_store = "a" # why',
    "object_store = 'a'",
    'object_store = """',
    'object_store = """"""',
    "object_store = 3",
    "object_store =",
    '"object_store" = "a"',
    'object_store = "a\tb"',
    'object_store = "a\x01b"',
    "readers_max = 9",
    "enabled = false",
    "=",
    "nonsense",
    "\r",
    "\ufeff",
    "\x0c",
)


@given(st.lists(st.sampled_from(LINES), max_size=6).map("\n".join))
def test_what_is_recognised_is_what_the_parser_says(text: str) -> None:
    said = object_store_of(text)
    if said is not None:
        assert load(text.encode()) == StoreSettings(object_store=said)


@given(st.text())
def test_nothing_is_recognised_that_is_no_toml(text: str) -> None:
    said = object_store_of(text)
    if said is not None:
        assert tomllib.loads(text).get("object_store", "") == said


def test_what_init_writes_is_recognised() -> None:
    assert object_store_of(EXAMPLE.format(object_store="s3://bucket/prefix")) == "s3://bucket/prefix"
    assert object_store_of("") == ""
    defaults = msgspec.to_builtins(StoreSettings())
    assert set(SECTIONS) == {name for name, value in defaults.items() if isinstance(value, dict)}
    assert {name for name in defaults if object_store_of(f'{name} = "x"') is not None} == {"object_store"}


@pytest.mark.parametrize(
    ("text", "what"),
    [("[manifest]\nobject_store = 'x'", "object_store"), ("[lsm]\n[lsm]", "lsm"), ("# \x00", "quire.toml")],
)
def test_what_is_wrong_is_told_by_the_parser(path: Path, text: str, what: str) -> None:
    quire.open(path).close()
    good = (path / "quire.toml").read_bytes()
    (path / "quire.toml").write_text(text, "utf-8")
    with pytest.raises(quire.InvalidConfig, match=what):
        quire.open(path)
    (path / "quire.toml").write_bytes(good)
