"""Formats values for users: sizes, times, counts, and records as short lists of fields. The reverse, parsing what users type,
is in `core/time_parsing.py`.

Pure functions, except for the local time zone.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import fields

from quire.core.clock import moment
from quire.core.ids import ArtifactKey
from quire.core.json_values import plain
from quire.core.limits import GIB, KIB, MIB

if TYPE_CHECKING:
    from quire.archive.status import ArchiveStatus
    from quire.manifest.records import DbKind
    from quire.manifest.slots import Chain
    from quire.service.values import MirrorStatus

SHORT_CHARACTERS = 48
"""Longer values are cut in text; JSON has all of them."""
NOT_OWNER = ("standby", "restored", "fenced")
"""States of an archive in whose directory nothing may be written."""


def non_default_fields(record: msgspec.Struct) -> dict[str, Any]:
    """Return the fields of a record that differ from their defaults."""
    defaults = {field.name: field.default for field in fields(type(record)) if not field.required}
    shown: dict[str, Any] = {}
    for name in record.__struct_fields__:
        value = getattr(record, name)
        if (name not in defaults or value != defaults[name]) and value not in (b"", [], {}, ()):
            shown[name] = plain(value)
    return shown


def pairs(values: dict[str, Any]) -> str:
    """Format a mapping as `a=1 b=x`."""
    return " ".join(f"{name}={_short(value)}" for name, value in values.items())


def _short(value: Any) -> str:
    return short(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, separators=(",", ":")))


def short(text: str) -> str:
    """Cut a text that is longer than `SHORT_CHARACTERS`.

    >>> short("a" * 49)
    'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa…'
    """
    return text if len(text) <= SHORT_CHARACTERS else f"{text[: SHORT_CHARACTERS - 3]}…"


def in_words(value: Any) -> str:
    """Format a value from an error or a problem without Python syntax.

    >>> from quire.core.ids import ArtifactKey, ArtifactKind
    >>> in_words(ArtifactKey(1, ArtifactKind.BASE, 5, 3)), in_words(("ghost",)), in_words((1, 2)), in_words(None)
    ('base 5 of database 1, generation 3', 'ghost', '1/2', 'nothing')
    >>> in_words(True), in_words([False])
    ('yes', 'no')
    """
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if type(value) in (str, int):
        return short(str(value))
    if isinstance(value, ArtifactKey):
        delta = f", delta {value.delta_id}" if value.delta_id else ""
        return f"{value.kind.name.lower()} {value.id} of database {value.origin_db_id}, generation {value.generation}{delta}"
    if isinstance(value, tuple | list):
        return ("/" if isinstance(value, tuple) else ", ").join(map(in_words, value))
    json_form = plain(value)
    return pairs(json_form) if isinstance(json_form, dict) else short(str(json_form))


def chain_text(chain: Chain, origin_db_id: int) -> str:
    """Format a chain as `base:1@60 + delta-1:2@100`: kind, generation and covered lsn of each artifact, and its origin database
    if that is another one."""
    links = []
    for link in chain:
        name = link.kind.name.lower() + (f"-{link.delta_id}" if link.delta_id else "")
        origin = "" if link.origin_db_id == origin_db_id else f" of db {link.origin_db_id}"
        links.append(f"{name}:{link.generation}@{link.covered_lsn}{origin}")
    return " + ".join(links)


def visible(text: str) -> str:
    """Escape control and bidirectional characters: names are user input and must not move the cursor.

    >>> print(visible("a\\x1b[2Jb\\u202ec größe 数据"))
    a\\x1b[2Jb\\u202ec größe 数据
    """
    return text if text.isprintable() else "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def size(count: int) -> str:
    """Format a number of bytes.

    >>> size(100), size(110_592), size(256 * GIB)
    ('100 B', '108.0 KiB', '256.0 GiB')
    """
    for unit, bytes_of in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if count >= bytes_of:
            return f"{count / bytes_of:,.1f} {unit}"
    return f"{count} B"


def local_moment(at_ms: int, now_ms: int) -> str:
    """Format a moment in local time, with its age."""
    return f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(at_ms / 1000))} ({span(now_ms - at_ms)} ago)"


def span(milliseconds: int) -> str:
    """Format a length of time.

    >>> span(400), span(90_000), span(150_000), span(7_200_000), span(200_000_000)
    ('0 s', '90 s', '2 min', '2 h', '2 days')
    """
    seconds = max(milliseconds, 0) // 1000
    for unit, seconds_of in (("days", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * seconds_of:
            return f"{seconds // seconds_of:,} {unit}"
    return f"{seconds} s"


def count_of(number: int, one: str, many: str = "") -> str:
    """Format a number with its noun, singular or plural.

    >>> count_of(1, "database"), count_of(2000, "batch", "batches")
    ('1 database', '2,000 batches')
    """
    return f"{number:,} {one if number == 1 else many or one + 's'}"


KIND_WORDS = {"pages": "page database", "stream": "stream", "lsm": "key-value set"}
"""Kind → what users call a database of it."""


def kind_text(kind: DbKind) -> str:
    """Format the kind of a database as people type it: `kv`. JSON has the name of the engine, `lsm`."""
    return "kv" if kind.name == "LSM" else kind.name.lower()


def databases_text(counts: dict[str, int]) -> str:
    """Format the number of databases of each kind; empty if there are none.

    >>> databases_text({"pages": 2, "stream": 0, "lsm": 1})
    '2 page databases, 1 key-value set'
    """
    return ", ".join(count_of(count, KIND_WORDS[kind]) for kind, count in counts.items() if count)


def behind_text(status: MirrorStatus) -> str:
    """Format what the target of a mirror lacks, and for how long; empty if it is up to date."""
    behind = [
        *([f"{count_of(status.changed, 'database')} changed"] if status.changed else []),
        *([f"{status.dropped:,} dropped"] if status.dropped else []),
    ]
    lag = f" in the last {span(int(status.lag_seconds * 1000))}" if status.lag_seconds >= 1 else ""
    return f"{', '.join(behind)}{lag}" if behind else ""


def tags_text(tags: dict[str, str]) -> str:
    """Format tags as `a=1, b=2`."""
    return ", ".join(f"{key}={value}" for key, value in sorted(tags.items()))


def article(word: str) -> str:
    """Put "a" or "an" before a word.

    >>> article("pages"), article("lsm")
    ('a pages', 'an lsm')
    """
    return f"an {word}" if word == "lsm" or word[0] in "aeio" else f"a {word}"


def ago_text(at_ms: int, now_ms: int) -> str:
    """Format a moment with its age; 0 is never."""
    return f"{moment(at_ms)} ({span(now_ms - at_ms)} ago)" if at_ms else "never"


def cost_text(status: ArchiveStatus) -> str:
    """Format what the requests of an archived store cost."""
    return f"about US$ {status.dollars_per_month:.2f} a month for requests at the list price of S3"


def drill_lines(status: ArchiveStatus, now_ms: int) -> list[tuple[str, str]]:
    """Format the last drill of an archive in one line. Only the owner of the store can run one."""
    drill = status.last_drill
    if drill is None:
        return [] if status.state in NOT_OWNER else [("last drill", "never: run `quire archive drill`")]
    result = "passed" if drill.is_good else f"FAILED with {count_of(len(drill.problems), 'problem')}"
    text = f"{ago_text(drill.at_ms, now_ms)}: {result}, restored in {drill.restore_seconds:.1f} s"
    return [("last drill", text)]
