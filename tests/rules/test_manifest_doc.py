"""docs/formats/manifest.md agrees with the code: tables, records, enumerations, packed layouts, operations, and the example.

The page is parsed by its headings and tables. Anything that is in the code and not on the page, or the other way round, is
a difference, and a difference fails.
"""

from __future__ import annotations

import enum
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import pytest

from quire.core.ids import ArtifactKind
from quire.manifest import migrations, overlay, records
from quire.manifest.change import CHANGE_LOG, ChangeRecord
from quire.manifest.ops import pageindex
from quire.manifest.ops.base import LOCAL_COUNTERS, Component, Counter, Op
from quire.manifest.ops.registry import OPS
from quire.manifest.reads import BORN_WITH_EPOCHS
from quire.manifest.records import LsmLogEnd
from quire.manifest.slots import ENTRY, ENTRY_FIELDS
from quire.manifest.store import ManifestStore
from quire.manifest.tables import META, OBJECT_PLACE, TABLES, Table
from quire.testing.clock import ManualClock
from tests.manifest.checkpoints import FullChunk, WalChunkUpdate, append_wal_chunk, checkpoint_apply
from tests.rules.tree import ROOT

PAGE = (ROOT / "docs" / "formats" / "manifest.md").read_text("utf-8")
WIDTHS = {"B": "u8", "H": "u16", "I": "u32", "Q": "u64"}

Row = tuple[str, ...]


# ── reading the page ──────────────────────────────────────────────────────────────────────────────────────────────────
def cells(line: str) -> Row:
    """The cells of a line of a table, without backticks."""
    parts = re.split(r"(?<!\\)\|", line.strip().strip("|"))
    return tuple(part.strip().strip("`").replace("\\|", "|") for part in parts)


def table_with_head(page: str, first: str, *, under: str = "") -> list[Row]:
    """The rows of the table whose first column is headed `first`, below the heading `under` if it is given."""
    if under:
        heading = re.search(rf"^#+ {re.escape(under)}$", page, re.MULTILINE)
        assert heading, f"the page has no heading {under!r}"
        page = page[heading.end() :]
    lines = page.splitlines()
    start = next((n for n, line in enumerate(lines) if line.startswith(f"| {first} |")), None)
    assert start is not None, f"the page has no table headed {first!r}"
    rows: list[Row] = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append(cells(line))
    return rows


def differences(page: Iterable[Row], code: Iterable[Row]) -> list[str]:
    """The rows that only one of them has; if there are none, whether the order differs."""
    page_rows, code_rows = list(page), list(code)
    problems = [f"the page lacks {row}" for row in code_rows if row not in page_rows]
    problems += [f"the code lacks {row}, which the page has" for row in page_rows if row not in code_rows]
    return problems or ([] if page_rows == code_rows else ["the order differs"])


# ── reading the code ──────────────────────────────────────────────────────────────────────────────────────────────────
def body_of(table: Table[Any]) -> str:
    return f"packed, {table.codec.packed.size} bytes" if table.codec.packed else "msgpack"


def table_rows(tables: Mapping[str, Table[Any]]) -> list[Row]:
    return [
        (
            name,
            ", ".join(f"{field} {width}" for field, width in table.key.fields),
            table.codec.record_type.__name__,
            body_of(table),
            table.policy.value,
            table.purpose,
        )
        for name, table in tables.items()
    ]


def op_rows(ops: Mapping[int, type[Op]]) -> list[Row]:
    return [
        (
            str(tag),
            op.__name__,
            ", ".join(op.__struct_fields__),
            Component(op.component).name if op.logged else "—",
            "yes" if op.logged else "no",
        )
        for tag, op in sorted(ops.items())
    ]


def spelling(hint: Any) -> str:
    """A type as the page writes it."""
    if hint == get_type_hints(ChangeRecord)["operations"]:
        return "tuple[Op, ...]"
    text = hint.__name__ if isinstance(hint, type) and not hasattr(hint, "__origin__") else str(hint)
    return re.sub(r"quire(?:\.\w+)*\.(\w+)", r"\1", text)


def default_of(field: msgspec.structs.FieldInfo) -> str:
    if field.default is not msgspec.NODEFAULT:
        return field.default.name if isinstance(field.default, enum.Enum) else repr(field.default)
    return "required" if field.default_factory is msgspec.NODEFAULT else repr(field.default_factory())


def record_rows(record: type[records.Record]) -> list[Row]:
    hints = get_type_hints(record)
    return [(field.name, spelling(hints[field.name]), default_of(field)) for field in msgspec.structs.fields(record)]


def packed_layout(table: Table[Any]) -> str:
    assert table.codec.packed is not None
    names = ["record_version", *table.codec.record_type.__struct_fields__]
    codes = table.codec.packed.format.lstrip("<")
    return ", ".join(f"{name} {WIDTHS[code]}" for name, code in zip(names, codes, strict=True))


def columns(layout: struct.Struct, names: Sequence[str]) -> list[Row]:
    """(name, offset, bytes) of each field of a struct."""
    sizes = [struct.calcsize("<" + code) for code in layout.format.lstrip("<")]
    assert len(sizes) == len(names)
    return [(name, str(sum(sizes[:n])), str(sizes[n])) for n, name in enumerate(names)]


NESTED = {records.Pin, LsmLogEnd}
"""Records that are fields of others."""
RECORDS = sorted({table.codec.record_type for table in TABLES.values()} | NESTED, key=lambda record: record.__name__)
ENUMERATIONS: list[type[enum.IntEnum]] = [
    *(
        kind
        for kind in vars(records).values()
        if isinstance(kind, type) and issubclass(kind, enum.IntEnum) and kind is not enum.IntEnum
    ),
    ArtifactKind,
    Component,
    Counter,
]


# ── the page against the code ─────────────────────────────────────────────────────────────────────────────────────────
def test_page_lists_every_table_as_it_is() -> None:
    assert not differences(table_with_head(PAGE, "table"), table_rows(TABLES))


def test_page_lists_every_op_as_it_is() -> None:
    page = table_with_head(PAGE, "tag")
    assert not differences([row[:5] for row in page], op_rows(OPS))
    assert all(row[5] for row in page), "every operation has a documented effect"


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: str(record.__name__))
def test_page_lists_the_fields_of_every_record(record: type[records.Record]) -> None:
    page = table_with_head(PAGE, "field", under=record.__name__)
    assert not differences([row[:3] for row in page], record_rows(record))


def test_page_describes_no_record_that_does_not_exist() -> None:
    assert sorted(re.findall(r"^#### (\w+)$", PAGE, re.MULTILINE)) == [record.__name__ for record in RECORDS]


def test_page_lists_every_enumeration_as_it_is() -> None:
    code = [(kind.__name__, ", ".join(f"{member.value} {member.name}" for member in kind)) for kind in ENUMERATIONS]
    assert not differences(table_with_head(PAGE, "enumeration"), code)


def test_page_lists_every_packed_layout_as_it_is() -> None:
    page = {
        name.strip("` "): (size, layout)
        for names, size, layout in table_with_head(PAGE, "tables")
        for name in names.split(",")
    }
    code = {
        name: (str(table.codec.packed.size), packed_layout(table))
        for name, table in TABLES.items()
        if table.codec.packed is not None
    }
    assert page == code


def test_page_shows_leaf_entries_as_they_are() -> None:
    page = [row[:3] for row in table_with_head(PAGE, "entry field")]
    assert page == columns(ENTRY, [name for name, _ in ENTRY_FIELDS])


def test_page_shows_the_packed_rows_of_ops_as_they_are() -> None:
    rows = table_with_head(PAGE, "page field")
    assert rows == columns(pageindex.ROW, [row[0] for row in rows])
    described = " ".join((pageindex.__doc__ or "").split())
    assert ", ".join(f"{name} u{8 * int(size)}" for name, _, size in rows) in described
    versions = table_with_head(PAGE, "version field")
    assert versions == columns(pageindex.VERSION_NAME, ["page", "lsn"])


def test_page_lists_the_names_in_meta() -> None:
    page = {name.strip("` ") for names, *_ in table_with_head(PAGE, "name") for name in names.split(",")}
    packed = (migrations.SCHEMA, migrations.STORE_ID, overlay.OLDEST_SEQUENCE)
    assert page == {
        *(META.key.unpack(key)[0] for key in packed),
        *LOCAL_COUNTERS.values(),
        BORN_WITH_EPOCHS,
        OBJECT_PLACE,
    }


# ── the example ───────────────────────────────────────────────────────────────────────────────────────────────────────
def hex_of(block: str) -> str:
    """The hex digits of a block of lines such as `01 00   meaning`."""
    return "".join(re.match(r"(?:[0-9a-f]{2}(?: |$))+", line)[0] for line in block.splitlines()).replace(" ", "")  # type: ignore[index]


def example_rows() -> list[Row]:
    block = re.search(r"```\n(db +\d.+?)```", PAGE, re.DOTALL)
    assert block, "the page has no example rows"
    return [tuple(line.split()) for line in block[1].splitlines()]


def test_example_is_what_the_code_writes(tmp_path: Path) -> None:
    clock = ManualClock(1_700_000_000_000)
    with ManifestStore.open(str(tmp_path / "manifest.lmdb"), clock=clock) as manifest:
        db_id = manifest.register_db("shop", records.DbKind.PAGES)
        segment = WalChunkUpdate(segment_id=1, first_lsn=1, last_lsn=9, used_bytes=4096)
        append_wal_chunk(manifest, db_id, segment).result()
        generation = manifest.reserve_generation(db_id)
        chunk = records.ChunkRecord(records.Residency.LOCAL, 8192, clock.now_ms(), lsn_start=1, lsn_end=9)
        checkpoint_apply(manifest, db_id, generation, [FullChunk(slot=300, record=chunk)], covered_lsn=9).result()
        assert not manifest.check()
        with manifest.read() as txn:
            stored = {(name, key.hex(), value.hex()) for name in TABLES for key, value in txn.raw_scan(TABLES[name])}
    assert example_rows()
    assert not [row for row in example_rows() if row not in stored]


def test_example_decodes_to_the_values_of_the_page() -> None:
    rows = {name: (bytes.fromhex(key), bytes.fromhex(value)) for name, key, value in example_rows()}
    decoded = {
        name: (TABLES[name].key.unpack(key), TABLES[name].rows.decode(key, value))
        for name, (key, value) in rows.items()
    }
    assert decoded["db"] == (
        (1,),
        records.DbRecord("shop", records.DbKind.PAGES, 1_700_000_000_000, next_generation=2),
    )
    assert decoded["db_names"] == (("shop",), records.IndexRecord(1))
    assert decoded["gc_refcounts"] == ((1, ArtifactKind.BASE, 300, 1, 0), records.RefcountRecord(in_use=1))
    change = decoded[CHANGE_LOG.name][1]
    assert (change.sequence, change.committed_at_ms, change.generation_updates) == (3, 1_700_000_000_000, ((1, 2),))
    assert change.operations == (OPS[13](1, 1),)  # ReserveGeneration(db_id, generation)

    annotated = re.search(r"The row of `db`, (\d+) bytes:\n\n```\n(.+?)```", PAGE, re.DOTALL)
    assert annotated
    assert hex_of(annotated[2]) == rows["db"][1].hex()
    assert int(annotated[1]) == len(rows["db"][1])


# ── the comparison itself ─────────────────────────────────────────────────────────────────────────────────────────────
def test_a_table_that_is_missing_on_the_page_is_detected() -> None:
    with_one_more = {**TABLES, "invented": TABLES["db"]}
    assert differences(table_with_head(PAGE, "table"), table_rows(with_one_more)) == [
        "the page lacks " + str(("invented", *table_rows(TABLES)[0][1:]))
    ]


def test_an_op_that_is_missing_on_the_page_is_detected() -> None:
    page = [row[:5] for row in table_with_head(PAGE, "tag")]
    assert len(differences(page, op_rows({**OPS, 9999: OPS[1]}))) == 1


def test_a_changed_row_of_the_page_is_detected() -> None:
    changed = PAGE.replace("`db_id u32, shard u16`", "`db_id u32, shard u32`")
    assert changed != PAGE
    assert len(differences(table_with_head(changed, "table"), table_rows(TABLES))) == 2
