"""Messages with false lengths, or nested deeper than any stack: refused with an error, by owner and client."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.errors import Incompatible, InvalidInput, QuireError
from quire.core.limits import MIB
from quire.service import messages as m
from quire.service.values import Request
from quire.service.wire import BAD, GOOD, ErrorForm, RemoteError, error_of, read_answer, read_call, read_form
from tests.hostile import FALSE_LENGTHS, memory_limit

REQUESTS = [
    kind for kind in vars(m).values() if isinstance(kind, type) and issubclass(kind, Request) and kind is not Request
]
BOUND = 64 * MIB


@pytest.mark.parametrize("data", FALSE_LENGTHS, ids=range(len(FALSE_LENGTHS)))
def test_false_lengths_are_refused_by_the_owner_and_by_the_client(data: bytes) -> None:
    """The client failed with `RecursionError` on a deeply nested answer."""
    with memory_limit(BOUND):
        for kind in REQUESTS:
            for body in (data, b"\x92\xc4\x00" + data, b"\x92\xc4\x00\x9f" + b"\x00" * 14 + data):
                with pytest.raises(InvalidInput):
                    read_call(body, kind)
        for answer in (Any, list[int], dict[str, Any], ErrorForm):
            with pytest.raises(Incompatible):
                read_answer(GOOD + data, answer)
        with pytest.raises(RemoteError) as refused:
            read_answer(BAD + b"\x95\xa1x\xa1y\xa0\x81\xa1z" + data, Any)
        assert isinstance(error_of(refused.value.form), QuireError)
        assert read_form(data).kind == "QuireError"


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.binary(max_size=20) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)


@given(
    kind=st.sampled_from(REQUESTS),
    key=st.binary(max_size=17),
    request=st.lists(values, max_size=8),
    cut=st.integers(0, 20),
)
def test_any_call_with_any_values_is_decoded_or_refused(
    kind: type[Any], key: bytes, request: list[Any], cut: int
) -> None:
    body = msgspec.msgpack.encode([key, request])
    for data in (body, body[: len(body) - cut]):
        try:
            read_call(data, kind)
        except InvalidInput:
            pass


@given(form=st.lists(values, max_size=6))
def test_any_error_with_any_values_is_raised_as_an_error_of_quire(form: list[Any]) -> None:
    assert isinstance(error_of(read_form(msgspec.msgpack.encode(form))), QuireError)
