"""Every listing on a terminal of 80 columns: no line is wider, and no word or number is broken."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import quire
from quire.cli import main, output
from quire.cli.output import Listing, ListingRow, TerminalStyle, text_parts, width_of
from quire.cli.tables import wrapped
from quire.manifest.records import JobKind
from tests.cli.conftest import write_pages

COLUMNS = 80
ORDERS, CLICKS, CARTS = "customer-orders-2026-eu-central", "clickstream-of-the-whole-company", "cart-of-all-users"

LISTINGS = [
    "ls", "info", "tree", "tree --sizes --all", "stats", "stats --snapshots", "metrics",
    "audit", "gc --dry-run", "doctor --no-objects",
    f"snapshot ls {ORDERS}", f"snapshot show {ORDERS} 1", f"snapshot diff {ORDERS} 1 2", f"retention show {ORDERS}",
    f"retention plan {ORDERS}", f"why {ORDERS}", "why pages/00000001/wal/00000001.seg", "why {chunk}", "why {log}",
    "jobs ls", "jobs show 1", "feed tail -n 0", "feed cursors", "manifest tables", "manifest check", "manifest verify",
    "manifest dump wal_catalog", "manifest dump snapshot_index", "manifest dump slot_leaf", f"manifest inspect {CLICKS}",
    f"stream ls {CLICKS}", f"stream info {CLICKS}", f"stream tail {CLICKS} -n 3", f"stream read {CLICKS} --limit 3",
    f"stream verify {CLICKS}", f"kv scan {CARTS}", f"kv stats {CARTS}", f"kv backups {CARTS}", f"kv verify {CARTS}",
    "verify --dry-run", "checkpoint --all --dry-run", "merge --all --dry-run",
]  # fmt: skip

WORD = re.compile(r"[^\s;]*[a-zA-Z][^\s;]{4,}[^\s;:]")
"""Names, keys and times, but not values that change every second."""
NUMBER, UNIT = re.compile(r"(?:^|[\s(])[\d.,]*\d$"), re.compile(r"\s*(?:(?:[KMG]i)?B|s|min|h|days)\b")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with long names, and numbers as large as in an old store."""
    path = tmp_path_factory.mktemp("s") / "data"
    with quire.open(path) as opened:
        opened.create(ORDERS, "pages")
        for fill in (b"a", b"b", b"c"):
            write_pages(opened, ORDERS, range(1200), fill)
            name = f"before-the-migration-{fill.decode()}"
            opened.snapshot(ORDERS, name, tags={"by": "ann.smith@example.org", "ticket": "OPS-12345"})
            opened.checkpoint(ORDERS)
        opened.pages.snapshot(ORDERS, tags={"by": "lend"}, expires_at_ms=1_900_000_000_000)
        opened.fork(ORDERS, f"{ORDERS}-fork")
        clicks = opened.stream(CLICKS, create=True)
        for _ in range(12):
            clicks.append([b"a record of many words %d" % number for number in range(4_000)]).result()
            clicks.seal()
        clicks.append([b"x" * 60, "größe 数据 ".encode() * 12]).result()
        clicks.upload()
        clicks.evict(1)
        carts = opened.kv(CARTS, create=True)
        for number in range(100):
            carts.put(b"user/%08d/cart/item" % number, b"3 apples and a value of many words " * 3)
        opened.feed.register(name="billing-service-in-the-other-region", ttl_seconds=90 * 86_400, max_lag=1_000_000)
        opened.manifest.jobs.enqueue(JobKind.MERGE, opened.database(ORDERS).db_id, delay_seconds=600)
    with redirect_stdout(io.StringIO()):
        for line in (f"retention set {ORDERS} --keep-last 1 --no-keep-named", f"kv backup {CARTS}"):
            assert main.run([*line.split(), "--store", str(path)]) == 0
    return path


def shown(path: Path, line: str, monkeypatch: pytest.MonkeyPatch, columns: int = COLUMNS) -> list[str]:
    chunk = next((path / "objects").rglob("base:*")).relative_to(path / "objects")
    log = next((path / "streams").rglob("*.mlog")).relative_to(path)
    monkeypatch.setattr(output.TerminalStyle, "of", lambda _: TerminalStyle(columns, False))
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main.run([*line.format(chunk=chunk, log=log).split(), "--store", str(path)])
    assert (code, err.getvalue()) == (0, "")
    return out.getvalue().splitlines()


@pytest.mark.parametrize("line", LISTINGS)
def test_every_listing_fits_80_columns(store: Path, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = shown(store, line, monkeypatch)
    assert [
        output_line for output_line in lines if width_of(output_line) > COLUMNS and str(store) not in output_line
    ] == []
    whole = {word for output_line in shown(store, line, monkeypatch, columns=0) for word in WORD.findall(output_line)}
    assert whole - {word for output_line in lines for word in WORD.findall(output_line)} == set(), (
        "words that were broken"
    )
    for before, after in pairwise(lines):
        assert not (NUMBER.search(before) and UNIT.match(after)), (before, after)


def test_columns_that_do_not_fit_are_shown_below_with_their_title(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = shown(store, "stats", monkeypatch)
    assert lines[0].split() == ["database", "size", "alone", "shared", "WAL"]
    assert [output_line for output_line in lines if output_line.startswith("    compression: ")]


def test_each_segment_of_a_stream_is_one_line(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = shown(store, f"stream ls {CLICKS}", monkeypatch)
    assert len(lines) == 14
    assert lines[0].split() == ["id", "first", "records", "size", "compressed", "sealed", "tiers"]
    assert lines[12].split()[:3] == ["12", "44,001", "4,000"]


# ── layouts ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def table(columns: list[str], *rows: list[str], width: int) -> list[str]:
    listing = Listing(columns=columns, rows=[ListingRow(cells, None) for cells in rows])
    return "".join(text_parts(listing, TerminalStyle(width, False))).splitlines()


def test_without_a_terminal_every_row_is_one_line() -> None:
    assert table(["a", "b"], ["x " * 100, "y " * 100], width=0)[1:] == [f"{'x ' * 100}  {'y ' * 100}".rstrip()]


def test_the_last_column_is_wrapped_first() -> None:
    lines = table([">n", "text"], ["7", "one two three four five"], width=22)
    assert lines == ["n  text", "7  one two three four", "   five"]


def test_long_texts_are_wrapped_next() -> None:
    lines = table(["text", "other"], ["one two three four five six seven", "eight nine ten eleven twelve"], width=40)
    assert lines == [
        "text                 other",
        "one two three four   eight nine ten",
        "five six seven       eleven twelve",
    ]


def test_columns_are_moved_below_last() -> None:
    lines = table(["name", ">number", "what"], ["a" * 20, "1,000", "b" * 12], ["c", "7", "-"], width=30)
    assert lines == ["name                  number", f"{'a' * 20}   1,000", f"    what: {'b' * 12}", f"c{' ' * 26}7"]


def cells() -> Iterator[str]:
    yield from (
        "",
        "-",
        "word",
        "two words",
        "12.5 KiB",
        "1,234,567",
        "2026-11-16 14:18:51Z",
        "x" * 30,
        "many words " * 8,
        "数据 größe",
    )


@given(
    st.lists(st.lists(st.sampled_from(list(cells())), min_size=4, max_size=4), min_size=1, max_size=4),
    st.integers(40, 120),
)
def test_every_table_fits_and_loses_nothing(rows: list[list[str]], width: int) -> None:
    lines = table(["a", ">number", "some text", "rest"], *rows, width=width)
    assert max(map(width_of, lines)) <= width
    printed = sorted(word for row in rows for cell in row if cell != "-" for word in cell.split())
    expected = sorted(word.rstrip(";") for line in lines for word in line.split())
    for word in set(printed):
        assert expected.count(word) >= printed.count(word)


@given(st.text(st.sampled_from("ab 1KiBs-:数ö"), max_size=60), st.integers(1, 30))
def test_wrapping_keeps_every_word(text: str, width: int) -> None:
    lines = wrapped(text, width)
    assert " ".join(lines).split() == text.split()
    for line in lines:
        assert width_of(line) <= width or " " not in line.strip() or re.search(r"\d (?:[KMGT]i)?(?:B|s)", line)
