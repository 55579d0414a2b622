"""Hrana's values: encoding and decoding round-trips, and invalid input is refused with a message."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.errors import InvalidInput
from quire.service.sql import protocol as p
from quire.service.sql.wire_values import WireBlob, WireInteger, WireValue, decode_value
from quire.sqlite.statements import StatementFailed

texts = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=30)
values = st.none() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | texts | st.binary(max_size=40)


@given(st.integers(1, 5).flatmap(lambda width: st.lists(st.tuples(*[values] * width), max_size=20)))
def test_rows_round_trip(rows: list[tuple[Any, ...]]) -> None:
    sent = msgspec.json.decode(b"[" + p.json_rows(rows) + b"]", type=list[list[Any]])
    assert len(sent) == len(rows)
    for row, cells in zip(rows, sent):
        for value, cell in zip(row, cells):
            if isinstance(value, float) and not math.isfinite(value):
                assert cell == {"type": "float", "value": None}
            else:
                assert decode_value(msgspec.convert(cell, WireValue)) == value
            assert cell["type"] != "integer" or isinstance(cell["value"], str)
            assert cell["type"] != "blob" or "=" not in cell["base64"]


@given(st.lists(st.tuples(values, values), max_size=20))
def test_rows_of_a_cursor_are_the_same_one_per_line(rows: list[tuple[Any, ...]]) -> None:
    lines = [json.loads(line) for line in p.json_entries(rows).splitlines()]
    assert [line["type"] for line in lines] == ["row"] * len(rows)
    assert [line["row"] for line in lines] == json.loads(b"[" + p.json_rows(rows) + b"]")


@pytest.mark.parametrize("text", ["AAE", "AAE="])
def test_a_blob_is_accepted_with_and_without_padding(text: str) -> None:
    assert decode_value(WireBlob(text)) == b"\0\1"


@pytest.mark.parametrize(
    "value",
    [WireBlob("§"), WireBlob("A"), WireInteger("x"), WireInteger(str(2**63)), WireInteger("9" * 5_000)],
)
def test_an_invalid_value_is_refused(value: WireValue) -> None:
    with pytest.raises(StatementFailed) as caught:
        decode_value(value)
    assert caught.value.code == "ARGS_INVALID"


@given(st.binary(max_size=200) | texts.map(str.encode))
def test_any_bytes_are_parsed_or_refused(body: bytes) -> None:
    for read in (p.read_pipeline, p.read_cursor, p.read_execute, p.read_batch, p.read_message):
        with pytest.raises(InvalidInput):
            read(body)


def test_deeply_nested_conditions_are_refused_early() -> None:
    deep = b'{"type":"not","cond":' * 20_000 + b'{"type":"ok","step":0}' + b"}" * 20_000
    with pytest.raises(InvalidInput):
        p.read_batch(b'{"batch":{"steps":[{"stmt":{"sql":"select 1"},"condition":' + deep + b"}]}}")


@pytest.mark.parametrize("count", [p.ENTRIES_MAX // 2, p.ENTRIES_MAX // 2 + 1])
def test_requests_and_steps_of_a_body_are_limited(count: int) -> None:
    """Hazard: each has an entry in the answer, and a step takes a dozen bytes of the body."""
    batch = b'{"type":"batch","batch":{"steps":[' + b",".join([b'{"stmt":{}}'] * (count - 1)) + b"]}}"
    body = b'{"requests":[' + b",".join([batch, batch]) + b"]}"
    if 2 * count <= p.ENTRIES_MAX:
        assert len(p.read_pipeline(body).requests) == 2
        return
    with pytest.raises(InvalidInput, match="too many statements"):
        p.read_pipeline(body)


def test_optional_fields_may_be_null() -> None:
    body = p.read_pipeline(
        b'{"baton":null,"requests":[{"type":"execute","stmt":'
        b'{"sql":"select 1","sql_id":null,"args":null,"named_args":null,"want_rows":null,"replication_index":null}}]}'
    )
    assert body.requests == [p.ExecuteRequest(p.WireStatement(sql="select 1"))]
