"""Text that fits, valid JSON, complete exit codes."""

from __future__ import annotations

import io
import json
import re
import sys
import time

import pytest

from quire.cli.errors import EXITS, INTERNAL, INTERRUPTED, OK, PIPE_CLOSED, PROBLEMS, exit_of
from quire.cli.output import Facts, JsonOutput, Listing, ListingRow, Node, Note, Report, TextOutput, Tree, width_of
from quire.core import errors
from quire.core.errors import QuireError, StoreLocked
from quire.core.ids import ArtifactKey, ArtifactKind
from tests.cli.commands import COMMANDS
from tests.rules.tree import ROOT, SRC


class Terminal(io.StringIO):
    """A terminal of 80 columns."""

    def isatty(self) -> bool:
        return True


def on_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return screen


LISTING = Listing(
    columns=["name", ">rows", "purpose"],
    rows=[ListingRow(["größe 数据", "1,000", "words " * 40], {"n": 1}), ListingRow(["b", "2", "short"], {"n": 2})],
)


def without_colours(text: str) -> str:
    return re.sub("\x1b\\[[0-9;]*m", "", text)


def test_a_listing_fits_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    TextOutput().show(LISTING)
    lines = without_colours(terminal.getvalue()).splitlines()
    assert max(map(width_of, lines)) <= 80
    assert lines[0] == "name         rows  purpose"
    assert lines[1].startswith("größe 数据  1,000  words")
    assert lines[2].startswith(" " * 19 + "words")
    assert lines[-1] == "b               2  short"


def test_colours_only_on_a_terminal_that_wants_them(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    TextOutput().show(LISTING)
    assert "\x1b[1m" in terminal.getvalue()
    monkeypatch.setenv("NO_COLOR", "1")
    plain = Terminal()
    monkeypatch.setattr(sys, "stdout", plain)
    TextOutput().show(LISTING)
    assert "\x1b" not in plain.getvalue()


def test_without_a_terminal_lines_are_not_wrapped(capsys: pytest.CaptureFixture[str]) -> None:
    TextOutput().show(LISTING)
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_control_characters_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    TextOutput().show(Facts(lines=[("name", "a\x1b[2Jb\nc")], data={}))
    assert capsys.readouterr().out == "name  a\\x1b[2Jb\\nc\n"


@pytest.mark.parametrize("value", [Note(text="a\u202eb", data={}), Facts(lines=[("n", "a\u202eb")], data={})])
def test_bidirectional_overrides_are_escaped(capsys: pytest.CaptureFixture[str], value: Note | Facts) -> None:
    TextOutput().show(value)
    row = ListingRow(["a\u202eb"], {})
    TextOutput().show(Listing(columns=["x"], rows=[row], closing="a\u202eb"))
    TextOutput().show(Listing(columns=["x"], rows=[], empty="a\u202eb"))
    TextOutput().fail(StoreLocked("a\u202eb", hint="a\u202eb", name="a\u202eb"))
    captured = capsys.readouterr()
    assert "\u202e" not in captured.out + captured.err
    assert (captured.out + captured.err).count("\\u202e") == 6


def test_messages_name_only_existing_commands() -> None:
    """In every package: a command in a hint exists."""
    paths = [
        path for path in (SRC / "quire").rglob("*.py") if path.parent.name != "archive"
    ]  # its commands are checked next
    text = "".join(path.read_text("utf-8") for path in paths)
    named = {tuple(words.split()) for words in re.findall(r"`quire ([a-z]+(?: [a-z][a-z-]+)?)", text)}
    groups = {words[0] for words in COMMANDS if len(words) > 1}
    assert len(named) > 50
    assert [
        words for words in named if (words if words[0] in groups else words[:1]) not in COMMANDS and words[1:]
    ] == []
    assert {words[0] for words in named} <= {words[0] for words in COMMANDS}


def test_text_has_times_and_words_where_json_has_values(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    artifact = ArtifactKey(1, ArtifactKind.DELTA, 5, 3, 2)
    error = errors.StillReferenced("held", since_ms=1_700_000_000_000, artifact=artifact, job=None, name="it's")
    TextOutput().fail(error)
    output = capsys.readouterr().err
    assert "since 2023-11-14 23:13:20 (" in output
    assert " days ago)" in output
    assert 'artifact=delta 5 of database 1, generation 3, delta 2, name="it\'s")' in output
    JsonOutput().fail(error)
    assert json.loads(capsys.readouterr().err)["error"]["where"]["since_ms"] == 1_700_000_000_000
    monkeypatch.delenv("TZ")
    time.tzset()


def test_errors_wrap_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    TextOutput().fail(StoreLocked("another owner has this open " * 5, hint="wait for it " * 10, path="/a/b"))
    lines = without_colours(terminal.getvalue()).splitlines()
    assert max(map(len, lines)) <= 80
    assert [line[:7] for line in lines if line[0] != " "] == ["error: ", "next:  "]


def test_json_is_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    for value, expected in (
        (LISTING, [{"n": 1}, {"n": 2}]),
        (Listing(columns=["a"], rows=[]), []),
        (Facts(lines=[], data={"a": b"\x01"}), {"a": "01"}),
        (Note(text="done", data={"x": (1, 2)}), {"x": [1, 2]}),
        (Report(parts=[LISTING], data={"x": 1}), {"x": 1}),
        (Tree(roots=[Node("a")], data=[{"a": []}]), [{"a": []}]),
    ):
        JsonOutput().show(value)
        assert json.loads(capsys.readouterr().out) == expected


def test_a_report_shows_its_parts_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    parts = (
        Facts(lines=[("a", "1")], data=None),
        Listing(columns=["x"], rows=[], empty="none"),
        Note(text="end", data=None),
    )
    TextOutput().show(Report(parts=parts, data={}))
    assert capsys.readouterr().out == "a  1\n\nnone\n\nend\n"


def test_a_tree_uses_only_characters_of_the_streams_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = Tree(roots=[Node("a", "words " * 30, [Node("b\u202e", faded=True)])], data=[], closing="end")
    terminal = on_terminal(monkeypatch)
    TextOutput().show(tree)
    lines = without_colours(terminal.getvalue()).splitlines()
    assert max(map(width_of, lines)) <= 80
    assert lines[-3:] == ["└── b\\u202e", "", "end"]
    assert "\x1b[1m" in terminal.getvalue()
    plain = io.StringIO()
    monkeypatch.setattr(sys, "stdout", plain)
    TextOutput().show(tree)
    assert len(plain.getvalue().splitlines()) == 4, "one line per node"
    assert "\x1b" not in plain.getvalue()


def all_errors() -> list[type[QuireError]]:
    return [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, QuireError)]


def test_every_error_has_an_exit_code_of_its_group() -> None:
    groups = {row.group for row in EXITS}
    assert {kind for kind in all_errors() if QuireError in kind.__bases__} == groups
    for error in all_errors():
        exit_code = exit_of(error("what"))
        assert exit_code.code not in (OK, PROBLEMS)
        assert (exit_code.code == INTERNAL) == (error in (errors.InternalError, QuireError))
        assert exit_code.next_step


def test_the_documentation_lists_the_exit_codes() -> None:
    page = (ROOT / "docs" / "cli.md").read_text("utf-8")
    codes = [int(code) for code in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)]
    assert codes == sorted({OK, PROBLEMS, INTERRUPTED, PIPE_CLOSED, *(row.code for row in EXITS)}), "each code once"
    for row in EXITS:
        assert re.search(rf"^\| {row.code} \| {re.escape(row.meaning)} \| .*`{row.group.__name__}`", page, re.MULTILINE)
