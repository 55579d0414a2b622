"""Slot leaves: their bytes, and which chains are valid."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.errors import InvalidInput, ManifestDamaged, OutOfRange
from quire.core.ids import ArtifactKey, ArtifactKind
from quire.core.limits import SLOTS_PER_LEAF
from quire.manifest.slots import (
    ENTRY,
    ENTRY_FIELDS,
    Chain,
    Leaf,
    Link,
    artifacts,
    check_chain,
    pack_leaf,
    place,
    unpack_leaf,
)

U32 = st.integers(0, 2**32 - 1)


@st.composite
def chains(draw: st.DrawFn) -> Chain:
    lsns = sorted(draw(st.sets(st.integers(0, 2**64 - 1), min_size=1, max_size=5)))
    base = Link(ArtifactKind.BASE, draw(U32), draw(U32), lsns[0])
    deltas = [Link(ArtifactKind.DELTA, draw(U32), draw(U32), lsn, number) for number, lsn in enumerate(lsns[1:], 1)]
    return (base, *deltas)


LEAVES = st.dictionaries(st.integers(0, SLOTS_PER_LEAF - 1), chains(), max_size=12)


@given(LEAVES)
def test_unpack_is_the_inverse_of_pack(leaf: Leaf) -> None:
    raw = pack_leaf(leaf)
    assert unpack_leaf(raw) == leaf
    assert len(raw) == ENTRY.size * sum(map(len, leaf.values()))


@given(LEAVES)
def test_entries_are_sorted_so_that_equal_leaves_have_equal_bytes(leaf: Leaf) -> None:
    reversed_leaf = dict(sorted(leaf.items(), reverse=True))
    assert pack_leaf(reversed_leaf) == pack_leaf(leaf)


@given(LEAVES, st.integers(0, 2**24 - 1))
def test_artifacts_are_named_by_their_slot(leaf: Leaf, number: int) -> None:
    keys = list(artifacts(leaf, number))
    assert len(keys) == sum(map(len, leaf.values()))
    for key in keys:
        leaf_number, offset = place(key.id)
        assert leaf_number == number
        assert any(link.artifact(key.id) == key for link in leaf[offset])


@given(U32)
def test_a_slot_has_one_position(slot: int) -> None:
    leaf, offset = place(slot)
    assert leaf * SLOTS_PER_LEAF + offset == slot
    assert 0 <= offset < SLOTS_PER_LEAF


@given(chains())
def test_one_base_and_rising_deltas_are_a_chain(chain: Chain) -> None:
    check_chain(chain, 0)


def link(kind: ArtifactKind, covered: int, delta_id: int = 0) -> Link:
    return Link(kind, 1, 1, covered, delta_id)


BASE, DELTA = ArtifactKind.BASE, ArtifactKind.DELTA


@pytest.mark.parametrize(
    "chain",
    [
        pytest.param((link(DELTA, 1, 1),), id="no base"),
        pytest.param((link(BASE, 1), link(BASE, 2)), id="two bases"),
        pytest.param((link(BASE, 1), link(DELTA, 1, 1)), id="a delta that covers nothing new"),
        pytest.param((link(BASE, 5), link(DELTA, 4, 1)), id="a delta that goes back"),
        pytest.param((link(BASE, 1), link(DELTA, 3, 1), link(DELTA, 2, 2)), id="deltas out of order"),
        pytest.param((link(BASE, 1), link(DELTA, 2, 1), link(DELTA, 3, 1)), id="one delta twice"),
        pytest.param((link(ArtifactKind.WAL, 1),), id="a segment as base"),
        pytest.param((link(BASE, 1), link(ArtifactKind.LEAF, 2)), id="a leaf as delta"),
    ],
)
def test_anything_else_is_not_a_chain(chain: Chain) -> None:
    with pytest.raises(InvalidInput):
        check_chain(chain, 3)


@given(st.binary(max_size=100))
def test_bytes_that_are_not_a_leaf_are_reported_as_damage(raw: bytes) -> None:
    try:
        leaf = unpack_leaf(raw)
    except ManifestDamaged:
        return
    assert sum(map(len, leaf.values())) * ENTRY.size == len(raw)


def test_an_unknown_kind_is_damage() -> None:
    with pytest.raises(ManifestDamaged):
        unpack_leaf(ENTRY.pack(0, 200, 0, 1, 1, 1))


@pytest.mark.parametrize(
    "invalid", [Link(BASE, 2**32, 1, 1), Link(BASE, 1, -1, 1), Link(BASE, 1, 1, 2**64), Link(DELTA, 1, 1, 1, 2**16)]
)
def test_a_number_that_does_not_fit_is_rejected(invalid: Link) -> None:
    with pytest.raises(OutOfRange):
        pack_leaf({0: (invalid,)})


def test_an_offset_beyond_the_leaf_is_rejected() -> None:
    with pytest.raises(OutOfRange):
        pack_leaf({SLOTS_PER_LEAF: (link(BASE, 1),)})


def test_numpy_has_the_layout_of_the_struct() -> None:
    numpy = pytest.importorskip("numpy")
    row = numpy.frombuffer(ENTRY.pack(9, 1, 2, 3, 4, 5), dtype=ENTRY_FIELDS)[0]
    assert tuple(map(int, row)) == (9, 1, 2, 3, 4, 5)
    assert numpy.dtype(ENTRY_FIELDS).itemsize == ENTRY.size
    assert Link(DELTA, 3, 4, 5, 2).artifact(7) == ArtifactKey(3, DELTA, 7, 4, 2)
