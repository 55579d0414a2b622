"""Quire's errors in Spark's messages: the sentence and its hint come before the traceback."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from quire.core.errors import NotFound, QuireError
from quire.spark.sources import error_messages
from quire.spark.sources.registry import SOURCES
from tests.spark.served_store import ServedStore, serve_store

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class Reader(error_messages.ReadableErrors):
    """A reader that fails in both ways."""

    def partitions(self) -> list[int]:
        raise NotFound("no such table", hint="it has: orders")

    def read(self) -> Iterator[int]:
        return self.rows()

    def rows(self) -> Iterator[int]:
        yield 1
        raise NotFound("no such table", hint="it has: orders")

    def helper(self) -> None:
        raise NotFound("no such table")


def test_in_a_worker_the_traceback_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(error_messages, "_is_worker", lambda: True)
    monkeypatch.delenv(error_messages.HIDE, raising=False)
    for call in (Reader().partitions, lambda: list(Reader().read())):
        with pytest.raises(NotFound) as caught:
            call()
        text = "".join(traceback.format_exception_only(caught.value))
        assert text.startswith(
            "quire.core.errors.NotFound: no such table; it has: orders\nTraceback (most recent call last):"
        )
        assert os.environ.pop(error_messages.HIDE) == "1"
    with pytest.raises(NotFound) as plain:
        Reader().helper()
    assert not hasattr(plain.value, "__notes__")


def test_elsewhere_nothing_changes() -> None:
    with pytest.raises(NotFound) as caught:
        Reader().partitions()
    assert not hasattr(caught.value, "__notes__")
    assert error_messages.HIDE not in os.environ


def test_every_source_explains_its_errors() -> None:
    for source in SOURCES:
        assert issubclass(source, error_messages.ReadableErrors)
        assert issubclass(source.READER, error_messages.ReadableErrors)


def first(error: BaseException) -> str:
    """The text before the traceback."""
    return str(error).partition("Traceback (most recent call last)")[0]


@pytest.mark.slow
def test_spark_shows_the_sentence_first(spark: SparkSession, tmp_path: Path) -> None:
    with serve_store(spark, tmp_path / "store") as owner:
        owner.run("shop", "CREATE TABLE orders(id INTEGER, who TEXT)", "INSERT INTO orders VALUES (1, 'ada')")
        with pytest.raises(Exception, match="no such table") as planned:
            owner.read("quire.sqlite", database="shop", table="nope")
        assert "it has: orders" in first(planned.value)
        with pytest.raises(Exception, match="misfits") as in_a_task:
            _read_as_dates(owner).collect()
        assert "a value is not a valid date" in first(in_a_task.value)
        assert not isinstance(in_a_task.value, QuireError)


def _read_as_dates(owner: ServedStore):  # type: ignore[no-untyped-def]
    reader = owner.spark.read.format("quire.sqlite").schema("id date")
    return reader.options(**owner.options, database="shop", table="orders").load()
