"""All operations: the union a change record holds, and the table of them in the documentation."""

from __future__ import annotations

from typing import get_args

from quire.manifest.ops.artifacts import PutChunk, PutDelta, PutNamespace, RecordUploads, UpdateArtifact
from quire.manifest.ops.audit import PruneAudit
from quire.manifest.ops.base import Op, ReserveIds, ReserveLocalIds
from quire.manifest.ops.corrections import CorrectIndex, CorrectRefcount, RestoreLocalRow, RestoreRow
from quire.manifest.ops.cursors import (
    AcknowledgeChanges,
    ClampCursor,
    DropCursor,
    LoseCursor,
    RegisterCursor,
    ResumeCursor,
    RetainChanges,
    TrimChanges,
)
from quire.manifest.ops.databases import (
    DropDb,
    RegisterDb,
    RemoveDb,
    RenameDb,
    ReserveGeneration,
    SetDbOptions,
    SetDbPageSize,
    SetRetention,
    UpdateDbStatus,
)
from quire.manifest.ops.epochs import BeginOwnerEpoch, DropNamespace
from quire.manifest.ops.jobs import CompleteJob, EnqueueJob, EnsureJob, ForgetJob, RenewJobLease, RequeueJob, StartJob
from quire.manifest.ops.local import (
    DropReader,
    FollowSqliteFile,
    PruneIdempotency,
    PutReader,
    RecordMetric,
    RecordVerification,
    SetFloor,
    SetObjectPlace,
)
from quire.manifest.ops.lsm import FoldLsm, RecordLsmEnds
from quire.manifest.ops.pageindex import DropPageVersions, ForgetPages, PublishPages
from quire.manifest.ops.plans import AbandonPlan, BeginPlan, FinishPlan
from quire.manifest.ops.refs import RemoveArtifact
from quire.manifest.ops.slots import CollectLeaf, SetSlots
from quire.manifest.ops.snapshots import DropSnapshot, ExtendSnapshot, ForkDb, PublishSnapshot
from quire.manifest.ops.wal import (
    AdvanceCheckpoint,
    AdvanceWal,
    AppendWalChunk,
    DiscardSegment,
    MoveWalState,
    OpenSegment,
)

AnyOp = (
    ReserveIds
    | RegisterDb
    | UpdateDbStatus
    | RenameDb
    | SetDbOptions
    | ReserveGeneration
    | SetDbPageSize
    | DropDb
    | SetRetention
    | RemoveDb
    | PutChunk
    | PutDelta
    | UpdateArtifact
    | PutNamespace
    | DropNamespace
    | BeginOwnerEpoch
    | SetSlots
    | CollectLeaf
    | OpenSegment
    | AppendWalChunk
    | MoveWalState
    | AdvanceWal
    | AdvanceCheckpoint
    | DiscardSegment
    | BeginPlan
    | FinishPlan
    | AbandonPlan
    | PublishSnapshot
    | DropSnapshot
    | ExtendSnapshot
    | RecordUploads
    | ForkDb
    | RemoveArtifact
    | CorrectRefcount
    | CorrectIndex
    | RestoreRow
    | RestoreLocalRow
    | PruneAudit
    | EnqueueJob
    | EnsureJob
    | StartJob
    | RequeueJob
    | CompleteJob
    | ForgetJob
    | RenewJobLease
    | PublishPages
    | DropPageVersions
    | ForgetPages
    | FoldLsm
    | RecordLsmEnds
    | RecordMetric
    | RegisterCursor
    | AcknowledgeChanges
    | DropCursor
    | TrimChanges
    | LoseCursor
    | RetainChanges
    | ClampCursor
    | ResumeCursor
    | ReserveLocalIds
    | PutReader
    | DropReader
    | SetFloor
    | PruneIdempotency
    | SetObjectPlace
    | RecordVerification
    | FollowSqliteFile
)

OPS: dict[int, type[Op]] = {op.__struct_config__.tag: op for op in get_args(AnyOp)}
"""Tag → operation."""

assert len(OPS) == len(get_args(AnyOp)), "two operations share a tag"
