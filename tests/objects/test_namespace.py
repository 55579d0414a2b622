"""Suffix and key of a namespace are inverse, and strangers are left alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.errors import InvalidName, OutOfRange
from quire.core.ids import U32_MAX, ArtifactKey, ArtifactKind, NamespaceId
from quire.durable.object_names import manifest_log_key
from quire.objects.namespace import RemoteNamespace

IDS = st.integers(1, U32_MAX)
ARTIFACTS = st.one_of(
    st.builds(ArtifactKey, IDS, st.just(ArtifactKind.BASE), IDS, IDS),
    st.builds(ArtifactKey, IDS, st.just(ArtifactKind.WAL), IDS, st.just(0)),
    st.builds(ArtifactKey, IDS, st.just(ArtifactKind.DELTA), IDS, IDS, st.integers(1, 0xFFFF)),
)


@given(artifact=ARTIFACTS, prefix=st.sampled_from(["", "tenant", "a/b/c", "a/b/"]))
def test_keys_come_back_as_the_artifacts_they_name(artifact: ArtifactKey, prefix: str) -> None:
    space = RemoteNamespace(id=NamespaceId(1), url="s3://bucket", prefix=prefix)
    key = space.key_of(artifact)
    assert space.artifact_of(key) == artifact
    assert key.startswith(prefix)
    assert not key.startswith("/")


def test_strangers_are_nobodys_artifacts() -> None:
    space = RemoteNamespace(id=NamespaceId(1), url="s3://bucket", prefix="tenant")
    key = space.key_of(ArtifactKey(1, ArtifactKind.BASE, 2, 3))
    for stranger in (key.removeprefix("tenant/"), "tenant2/" + key, key + "x", "tenant", "tenant/README", key.upper()):
        assert space.artifact_of(stranger) is None
    assert space.suffix_of("tenant2/x") is None


def test_manifest_log_chunks_have_their_place() -> None:
    space = RemoteNamespace(id=NamespaceId(1), url="s3://bucket", prefix="p")
    assert space.key(manifest_log_key(7, 3)) == "p/manifest/7/3.mlog"


def test_namespaces_that_make_no_sense_are_refused() -> None:
    with pytest.raises(OutOfRange):
        RemoteNamespace(id=NamespaceId(0), url="s3://bucket")
    for prefix in ("/a", "a//b", "../a"):
        with pytest.raises(InvalidName):
            RemoteNamespace(id=NamespaceId(1), url="s3://bucket", prefix=prefix)
    with pytest.raises(InvalidName):
        RemoteNamespace(id=NamespaceId(1), url="s3://bucket").key("../x")
