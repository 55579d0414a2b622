"""All operations by tag, and their union, which is the type of operations in a change record.

An operation is a subclass of `Op` in one of the modules below. Operations of other modules cannot be decoded from the
change log.
"""

from typing import TYPE_CHECKING, Any, Union

from quire.manifest.ops import (
    artifacts,
    base,
    corrections,
    cursors,
    databases,
    jobs,
    local,
    mirrors,
    pageindex,
    plans,
    refs,
    slots,
    snapshots,
    timeline,
    wal,
)
from quire.manifest.ops.base import Op

_MODULES = (
    base, databases, artifacts, refs, slots, wal, plans, snapshots, corrections, jobs, pageindex, cursors, local,
    timeline, mirrors
)  # fmt: skip
_CLASSES = dict.fromkeys(
    kind
    for module in _MODULES
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, Op) and kind is not Op
)

OPS: dict[Any, type[Op]] = {kind.__struct_config__.tag: kind for kind in _CLASSES}
"""Tag → operation."""

assert len(OPS) == len(_CLASSES), "two operations share a tag"

if TYPE_CHECKING:
    AnyOp = Op
else:
    AnyOp = Union[tuple(OPS.values())]  # noqa: UP007 - the union is computed
