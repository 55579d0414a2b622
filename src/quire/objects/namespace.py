"""A remote namespace: where a family of artifacts lives, so that their rows need only a compact suffix (the catalog document).

Terms
  namespace  (id, url, prefix): a bucket or directory and a static prefix in it, recorded once in the manifest
  suffix     the canonical name of an artifact below it, `{origin:08x}/{id:08x}/{variant}:{generation:08x}`, or
             `manifest/<stream>/<chunk>.mlog`

Rules
  1. Suffixes are built and parsed by `quire.durable.names` only; this module joins and splits, nothing more.
  2. key = prefix + '/' + suffix, or the suffix alone if the prefix is empty; `suffix_of` is its inverse and says None
     to keys that are not below the prefix, so that a sweep leaves strangers alone.

Raises: `InvalidName`.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.core.ids import ArtifactKey, NamespaceId, some_u32
from quire.durable.names import object_key, parse_object_key
from quire.objects.api import check_key, check_prefix


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteNamespace:
    """Joins compact suffixes to object keys.

    >>> from quire.core.ids import ArtifactKind
    >>> space = RemoteNamespace(id=NamespaceId(1), url="s3://bucket", prefix="tenant-7")
    >>> key = space.key_of(ArtifactKey(1, ArtifactKind.BASE, 42, 3))
    >>> key
    'tenant-7/00000001/0000002a/base:00000003'
    >>> space.artifact_of(key)
    ArtifactKey(origin_db_id=1, kind=<ArtifactKind.BASE: 0>, id=42, generation=3, delta_id=0)
    """

    id: NamespaceId
    url: str
    prefix: str = ""

    def __post_init__(self) -> None:
        some_u32("namespace id", self.id)
        object.__setattr__(self, "prefix", check_prefix(self.prefix))

    def key(self, suffix: str) -> str:
        """The key of a suffix, checked."""
        return check_key(f"{self.prefix}/{suffix}" if self.prefix else suffix)

    def suffix_of(self, key: str) -> str | None:
        """The suffix of a key, None if the key is not in this namespace."""
        if not self.prefix:
            return key
        return key[len(self.prefix) + 1 :] if key.startswith(self.prefix + "/") else None

    def key_of(self, artifact: ArtifactKey) -> str:
        """Where an artifact is."""
        return self.key(object_key(artifact))

    def artifact_of(self, key: str) -> ArtifactKey | None:
        """Which artifact a key names, None for strangers."""
        suffix = self.suffix_of(key)
        return None if suffix is None else parse_object_key(suffix)
