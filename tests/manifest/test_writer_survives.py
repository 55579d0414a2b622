"""The writer survives errors that it has not caused, and notifies every waiter if it stops."""

from __future__ import annotations

import pytest
import structlog

from quire.core.errors import StoreUnusable
from quire.core.settings import ManifestSettings
from quire.manifest.env import ManifestEnv
from quire.manifest.ops.base import Op
from quire.manifest.store import ManifestStore
from quire.manifest.writer import ManifestWriter
from quire.testing.clock import ManualClock
from tests.manifest.helpers import chunk, eventually, register


class Uncountable(tuple[Op, ...]):
    """Operations that cannot be counted, for example because memory is exhausted."""

    __slots__ = ()

    def __len__(self) -> int:
        raise MemoryError


def test_no_batch_is_lost_when_the_queue_cannot_be_split_into_groups(path: str) -> None:
    """Hazard: the writer lost batches that it had taken but not yet assigned to a group; their callers waited for
    ever."""
    env = ManifestEnv(path, ManifestSettings(), write=True)
    writer = ManifestWriter(env, ManualClock())
    guards = [writer.submit([chunk(n)]) for n in range(3)]
    guards[1].ops = Uncountable(guards[1].ops)
    with pytest.raises(MemoryError):
        writer._take()
    assert [id(guard) for guard in writer._carry] == [id(guard) for guard in guards]
    with pytest.raises(MemoryError):
        writer._take()
    writer._stop_with_error(MemoryError())
    for guard in guards:
        with pytest.raises(StoreUnusable):
            guard.result(1)
    env.close()


def test_a_log_processor_that_raises_does_not_stop_the_writer(
    manifest: ManifestStore, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(_logger: object, _level: str, _event: object) -> str:
        raise ZeroDivisionError("a bug of the application")

    structlog.configure(processors=[broken])
    try:
        for n in range(1, 4):
            manifest.submit([register(n)]).result(30)
        assert eventually(lambda: manifest.writer.stats.commits == 3)
    finally:
        structlog.reset_defaults()
    assert manifest.writer.failure is None
    assert "manifest.commit was lost: a log processor raised ZeroDivisionError" in capsys.readouterr().err
