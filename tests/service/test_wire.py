"""Encoding of calls, answers and errors."""

from __future__ import annotations

import pickle
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import quire
from quire.core import errors
from quire.core.errors import QuireError
from quire.manifest.records import DbKind
from quire.service import messages as m
from quire.service import wire
from quire.service.tickets import Action, Scope
from quire.service.values import Request
from tests.rules.tree import ROOT

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, QuireError)]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_error_round_trips(kind: type[QuireError]) -> None:
    error = kind("what", hint="do", name="shop", count=2**64 - 1, nothing=None, yes=True, raw=b"\x00", some=[1, "a"])
    with pytest.raises(wire.RemoteError) as refused:
        wire.read_answer(b"".join(wire.write_error(error)), int)
    arrived = wire.error_of(refused.value.form)
    assert type(arrived) is kind
    assert (arrived.what, arrived.hint, arrived.where) == (error.what, error.hint, error.where)
    copy = pickle.loads(pickle.dumps(arrived))
    assert (type(copy), str(copy)) == (kind, str(error))


def test_an_unknown_error_class_becomes_the_base_class_and_keeps_its_name() -> None:
    for kind in ("FromTheFuture", "Any", "__name__", "annotations"):
        error = wire.error_of(wire.ErrorForm(kind, "what", "", {"what": 1, "hint": 2, "kind": 3, "x": 4}))
        assert type(error) is QuireError
        assert error.where["kind"] == kind
        assert error.where["x"] == 4


def test_values_that_msgpack_cannot_encode_become_text() -> None:
    error = quire.InvalidInput("x" * 9_000, a=object, b=2**70, c={"a": 1}, d=(1, (2, DbKind.LSM)), e="y" * 9_000)
    form = wire.form_of(error)
    assert form.where["b"] == str(2**70)
    assert form.where["d"] == [1, [2, 3]]
    assert len(wire.write_form(error)) < 7_000, "it must fit into a header"
    assert isinstance(wire.error_of(form), quire.InvalidInput)


def test_an_error_about_text_that_is_not_unicode_can_be_sent() -> None:
    """It ended the owner's thread for the connection, and the client asked again and again."""
    error = quire.InvalidInput("no \udcff", hint="\udcfe", name="x\udcfd", names=["y\udcfc"], long="\udcff" * 9_000)
    with pytest.raises(wire.RemoteError) as refused:
        wire.read_answer(b"".join(wire.write_error(error)), int)
    form = refused.value.form
    assert (form.what, form.hint, form.where["name"]) == (r"no \udcff", r"\udcfe", r"x\udcfd")
    assert form.where["names"] == [r"y\udcfc"]
    assert len(wire.write_form(error)) < 7_000, "it must fit into a header"


def test_long_answers_are_split_and_joined() -> None:
    value = [b"x" * 700_000] * 5
    parts = list(wire.write_answer(value))
    assert max(map(len, parts)) <= wire.PART_BYTES
    assert len(parts) == 4
    assert wire.read_answer(b"".join(parts), list[bytes]) == value


@given(st.binary(max_size=200))
def test_garbage_is_refused_and_never_executed(body: bytes) -> None:
    for action in m.ACTIONS.values():
        try:
            key, request = wire.read_call(body, action.request)
        except quire.InvalidInput:
            continue
        assert isinstance(request, action.request)
        assert len(key) in (0, 16)
    try:
        wire.read_answer(body, dict[str, Any])
    except (wire.RemoteError, quire.Incompatible):
        pass
    assert isinstance(wire.error_of(wire.read_form(body)), QuireError)


def test_unknown_fields_at_the_end_are_ignored_and_missing_ones_have_defaults() -> None:
    """A newer client may send more, an older one less (rule 3)."""
    newer = msgspec.msgpack.encode([b"", ["shop", "pages", {}, "", "more"]])
    assert wire.read_call(newer, m.Create)[1] == m.Create("shop", "pages")
    older = msgspec.msgpack.encode([b"", ["shop", "pages"]])
    assert wire.read_call(older, m.Create)[1] == m.Create("shop", "pages")


def test_a_key_has_sixteen_bytes() -> None:
    assert wire.read_call(wire.write_call(b"k" * 16, m.Nothing()), m.Nothing)[0] == b"k" * 16
    with pytest.raises(quire.InvalidInput, match="16 bytes"):
        wire.read_call(wire.write_call(b"k", m.Nothing()), m.Nothing)


def test_protocol_versions_must_be_equal() -> None:
    assert wire.version_error(str(wire.WIRE_VERSION)) is None
    for version in ("", "0", "2", "one"):
        wrong = wire.version_error(version)
        assert wrong is not None
        assert "same version" in wrong.hint


def test_the_page_lists_every_action() -> None:
    page = (ROOT / "docs" / "formats" / "wire.md").read_text("utf-8")
    listed = [row.split("|")[1:5] for row in page.splitlines() if row.startswith("| `")]
    documented = {
        name.strip(" `"): (request.strip(" `"), caller.strip(), key.strip() == "yes")
        for name, request, caller, key in listed
    }
    assert documented == {
        action.name: (_form(action.request), _permission(action), action.keyed) for action in m.ACTIONS.values()
    }


def _permission(action: Action) -> str:
    """The permission, in the words of the page."""
    if action.scope is Scope.HELD:
        return "any"
    if action.scope is Scope.DATABASE:
        return "write it" if action.writes else "read it"
    return action.access.value


def test_the_examples_of_the_page_are_right() -> None:
    page = (ROOT / "docs" / "formats" / "wire.md").read_text("utf-8").partition("## Example")[2]
    shown = [_bytes(line) for line in page.splitlines() if line[:3] in ("92 ", "00 ", "01 ")]
    assert shown == [
        wire.write_call(bytes(range(16)), m.Create("shop", "pages")),
        b"".join(wire.write_answer(7)),
        b"".join(wire.write_error(quire.NameTaken("taken", name="shop"))),
    ]


def _bytes(line: str) -> bytes:
    """Parses hexadecimal numbers and quoted text."""
    parts = [word[1:-1].encode() if word[0] == '"' else bytes.fromhex(word) for word in line.split()]
    return b"".join(parts)


def _form(request: type[Request]) -> str:
    return f"[{', '.join(field.name for field in msgspec.structs.fields(request))}]"
