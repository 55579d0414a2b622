"""Names: build and parse are inverse, other texts are rejected, and users' names follow one rule."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from quire.core.errors import InvalidInput, InvalidName, OutOfRange
from quire.core.ids import ArtifactKey, ArtifactKind
from quire.durable import names
from quire.durable.names import (
    check_name,
    object_key,
    parse_object_key,
    parse_path,
)
from quire.durable.object_names import manifest_log_key, parse_manifest_log_key

IDS = st.integers(1, 2**32 - 1)
U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
KEYS = st.one_of(
    st.builds(
        ArtifactKey,
        origin_db_id=IDS,
        kind=st.sampled_from([ArtifactKind.BASE, ArtifactKind.WAL]),
        id=U32,
        generation=U32,
    ),
    st.builds(
        ArtifactKey,
        origin_db_id=IDS,
        kind=st.just(ArtifactKind.DELTA),
        id=U32,
        generation=U32,
        delta_id=st.integers(0, 2**16 - 1),
    ),
)
NAMES = st.one_of(
    st.builds(names.FixedFile, name=st.sampled_from(sorted(names.FIXED_FILES))),
    st.builds(names.LeaseFile, reader=st.uuids()),
    st.builds(names.WalSegmentFile, db_id=IDS, segment_id=U32),
    st.builds(names.FollowFile, db_id=IDS),
    st.builds(names.CachedChunkFile, db_id=IDS, key=KEYS),
    st.builds(names.StreamSegmentFile, stream_id=U64, tier=st.sampled_from(names.Tier), segment_id=U64),
    st.builds(names.ManifestLogFile, stream_id=U64, chunk_index=U64, temporary=st.booleans()),
    st.builds(names.ManifestLogSnapshotFile, stream_id=U64, snapshot_id=U64),
    st.builds(names.ManifestLogLock, stream_id=U64),
    st.builds(names.LsmManifestLogFile, db_id=IDS, number=U64),
    st.builds(names.LsmManifestSnapshotFile, db_id=IDS, number=U64),
    st.builds(names.LsmWalFile, db_id=IDS, number=U64),
    st.builds(names.SstFile, db_id=IDS, sst_id=U64),
    st.builds(names.ScratchDir, job_id=U64),
    st.builds(names.QuarantineNote, number=IDS),
    st.builds(
        names.QuarantinedFile, number=IDS, original=st.sampled_from(["quire.toml", "lsm/00000001/wal/000001.log"])
    ),
)


@pytest.mark.parametrize(
    ("name", "path"),
    [
        (names.FixedFile(name="quire.toml"), "quire.toml"),
        (names.WalSegmentFile(db_id=0xAB, segment_id=16), "pages/000000ab/wal/00000010.seg"),
        (names.ManifestLogFile(stream_id=7, chunk_index=12), "streams/7/manifest/12.mlog"),
        (names.ManifestLogSnapshotFile(stream_id=7, snapshot_id=3), "streams/7/manifest/snapshot_3.bin"),
        (names.LsmManifestLogFile(db_id=1), "lsm/00000001/manifest/000000.log"),
        (names.LsmManifestSnapshotFile(db_id=1), "lsm/00000001/manifest/MANIFEST-000001"),
        (names.SstFile(db_id=1, sst_id=1_000_000), "lsm/00000001/sst/1000000.sst"),
        (names.ScratchDir(job_id=99), "scratch/99"),
    ],
)
def test_paths_match_the_documented_layout(name: names.StoreName, path: str) -> None:
    assert name.path == path
    assert parse_path(path) == name


@given(name=NAMES)
def test_every_path_parses_to_what_built_it(name: names.StoreName) -> None:
    assert parse_path(name.path) == name


@given(key=KEYS)
def test_every_object_key_parses_to_what_built_it(key: ArtifactKey) -> None:
    assert parse_object_key(object_key(key)) == key


@given(stream_id=U64, chunk_index=U64)
def test_every_manifest_log_key_parses_to_what_built_it(stream_id: int, chunk_index: int) -> None:
    assert parse_manifest_log_key(manifest_log_key(stream_id, chunk_index)) == (stream_id, chunk_index)


VALID_TEXTS = st.one_of(NAMES.map(lambda name: name.path), KEYS.map(object_key), st.just("manifest/1/2.mlog"))


@given(text=st.text() | st.from_regex(r"[a-z]+/[0-9a-f]{8}/[a-z]+/[0-9a-fA-F]{1,9}\.(seg|log|sst)\n?", fullmatch=True))
@example("pages/00000000/wal/00000001.seg")
@example("pages/00000001/wal/00000001.seg\n")
@example("streams/99999999999999999999/manifest/1.mlog")
@example("streams/٣/manifest/1.mlog")
@example("lsm/00000001/sst/0000001.sst")
def test_a_text_that_parses_is_exactly_the_text_of_its_name(text: str) -> None:
    name = parse_path(text)
    assert name is None or name.path == text
    key = parse_object_key(text)
    assert key is None or object_key(key) == text
    pair = parse_manifest_log_key(text)
    assert pair is None or manifest_log_key(*pair) == text


@given(text=VALID_TEXTS, position=st.integers(0, 80), extra=st.sampled_from("0/aA.\n ٣:-"))
def test_one_inserted_character_makes_an_invalid_or_a_different_name(text: str, position: int, extra: str) -> None:
    changed = text[:position] + extra + text[position:]
    name, key, pair = parse_path(changed), parse_object_key(changed), parse_manifest_log_key(changed)
    assert name is None or name.path == changed
    assert key is None or object_key(key) == changed
    assert pair is None or manifest_log_key(*pair) == changed


def test_ids_are_checked_when_a_name_is_built() -> None:
    builders: list[Callable[[], str]] = [
        lambda: names.WalSegmentFile(db_id=0, segment_id=1).path,
        lambda: names.WalSegmentFile(db_id=2**32, segment_id=1).path,
        lambda: names.scratch_dir(-1),
        lambda: manifest_log_key(2**64, 0),
        lambda: object_key(ArtifactKey(1, ArtifactKind.DELTA, 1, 1, 2**16)),
    ]
    for build in builders:
        with pytest.raises(OutOfRange):
            build()


@pytest.mark.parametrize("kind", [ArtifactKind.LEAF, ArtifactKind.NAMESPACE])
def test_an_artifact_without_an_object_has_no_key(kind: ArtifactKind) -> None:
    with pytest.raises(InvalidInput):
        object_key(ArtifactKey(1, kind, 1, 1))
    with pytest.raises(InvalidInput):
        object_key(ArtifactKey(1, ArtifactKind.BASE, 1, 1, delta_id=4))


@pytest.mark.parametrize("name", ["a", "größe", "x" * 200, "a b", "a.b", "...", "日本", "C:\\x", "-", "🙂" * 50])
def test_valid_names(name: str) -> None:
    assert check_name("database", name) == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        "x" * 201,
        "é" * 101,
        "a/b",
        ".",
        "..",
        " a",
        "a ",
        "\u00a0a",
        "a\tb",
        "a\n",
        "a\x00",
        "\x7f",
        "\x85",
        "\ud800",
    ],
)
def test_invalid_names(name: str) -> None:
    with pytest.raises(InvalidName) as caught:
        check_name("database", name)
    assert caught.value.hint
    str(caught.value).encode()


@given(name=st.text(max_size=260))
def test_no_text_crashes_the_name_check(name: str) -> None:
    try:
        accepted = check_name("cursor", name)
    except InvalidName:
        return
    assert 1 <= len(accepted.encode()) <= 200
    assert not re.search(r"[\x00-\x1f\x7f-\x9f/]", accepted)
