"""The quick way shows what the usual way shows, letter by letter, or leaves it to that."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import typer

import quire
from quire.cli import app, lane, quick, typed
from quire.cli.command import Cli
from quire.cli.values import Value
from quire.durable import names
from quire.manifest.glance import Unfamiliar
from tests.cli.conftest import quire_program

COMMANDS = [["ls"], ["info"], ["tree"], ["snapshot", "ls", "shop"], ["snapshot", "ls", "shop-test"]]


@pytest.fixture
def family(tmp_path: Path) -> Path:
    """A store with everything that the quick way tells of."""
    root = tmp_path / "store"
    with quire.open(root) as store:
        store.create("shop", "pages", tags={"by": "größe"})
        store.create("clicks", "stream")
        store.create("cart", "lsm")
        with store.sqlite("shop") as db:
            db.execute("create table t(x)")
        for number in range(8):
            store.snapshot("shop", f"s{number}", tags={"n": str(number)})
        store.fork("shop", "shop-test", at="s1")
        store.fork("shop-test", "deeper")
        store.drop("shop-test")
        store.fork("shop", "shop-test")
        store.snapshot("shop-test")
        store.snapshot("cart", "kept")
    return root


def usual(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert typed.run_app(app.app_for(arguments), arguments) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("as_json", [[], ["--json"]], ids=["text", "json"])
@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_the_quick_way_shows_what_the_usual_way_shows(
    family: Path, words: list[str], as_json: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*words, "--store", str(family), *as_json]
    expected = usual(arguments, capsys)
    assert lane.run(arguments) == 0, "the lane took it"
    shown = capsys.readouterr().out
    if words == ["info"]:  # the reader counts itself
        expected, shown = (
            text.replace('"readers": 2', '"readers": 1').replace("2 slots", "1 slot") for text in (expected, shown)
        )
    assert shown == expected


def test_the_list_of_commands_is_the_usual_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert quick.help_text() == usual(["--help"], capsys), "write src/quire/cli/help.txt again: `quire --help` of typer"
    monkeypatch.setenv("COLUMNS", "60")
    assert lane.run(["--help"]) is None, "typer breaks the lines"
    narrow = usual(["--help"], capsys)
    assert max(map(len, narrow.splitlines())) <= 60
    monkeypatch.setenv("COLUMNS", "200")
    assert quick.help_text() == usual(["--help"], capsys)


def test_every_first_word_has_its_module() -> None:
    for module, words in app.MODULES.items():
        one: Any = typer.main.get_command(app.assembled([module]))
        assert set(one.commands) == set(words), module


def test_the_names_are_those_of_the_store() -> None:
    assert (quick.CONFIG, quick.MANIFEST, quick.OBJECTS) == (names.CONFIG, names.MANIFEST, names.OBJECTS)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('object_store = "s3://bucket/prefix"', "s3://bucket/prefix"),
        ('object_store = "elsewhere"', "elsewhere"),
        ("[manifest]\nmap_bytes = 1073741824", None),
        ("object_store = 'quoted otherwise'", None),
        ('object_store = "ftp://x"', None),
        ("no toml at all", None),
    ],
)
def test_what_quire_toml_says(family: Path, line: str, told: str | None) -> None:
    (family / "quire.toml").write_text(line + "\n", "utf-8")
    if told is None:
        with pytest.raises(Unfamiliar):
            quick.ls(Cli(str(family)))
    else:
        assert dict(quick.info(Cli(str(family))).lines)["objects"].endswith(told)


def test_what_is_wrong_is_told_by_the_usual_way(family: Path) -> None:
    assert lane.run(["snapshot", "ls", "nobody", "--store", str(family)]) is None
    ended = quire_program("snapshot", "ls", "nobody", "--store", str(family))
    assert (ended.returncode, "no database has this name" in ended.stderr) == (3, True)
    (family / "manifest.lmdb").write_bytes(os.urandom(64 * 1024))
    assert lane.run(["ls", "--store", str(family)]) is None
    assert quire_program("ls", "--store", str(family)).returncode == 7


def test_values_are_frozen_and_say_what_is_missing() -> None:
    class Point(Value):
        x: int
        y: int = 0

    point = Point(1)
    assert (point, hash(point)) == (Point(x=1, y=0), hash(Point(1, 0)))
    assert point != Point(2)
    with pytest.raises(AttributeError):
        point.x = 3  # type: ignore[misc]
    make: Any = Point
    for given, named in (((), {}), ((1, 2, 3), {}), ((1,), {"x": 1}), ((1,), {"z": 1})):
        with pytest.raises(TypeError):
            make(*given, **named)
