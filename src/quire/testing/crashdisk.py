"""A `Disk` that records what was not synced, and can produce the directory as power loss could have left it.

What a sync has covered is durable: a file's bytes and size by `File.sync`, a directory's names by `Disk.sync_dir`. Everything
since then is pending: each write (by 512-byte sector), each change of size, each change of a name. A *chooser* decides for each
pending change, independently, whether power loss kept it, dropped it, or (bytes only) garbled it: `random.Random(seed).choice`,
a hypothesis draw, `keep_all`, `drop_all`, or one of `every_chooser()`. This is harsher than a journaling file system, and as
harsh as POSIX permits: a write beyond the end may leave the new size without its bytes, a file whose name is not durable may
vanish although its bytes were synced, and a removed or replaced file may reappear.

Live files are real files, so that `fileno`, mmap and locks work; bytes changed through a mapping are detected by comparison, at
the next sync or at the crash.

Threads: any; one lock makes operations atomic. Nothing is really synced, so that tests stay fast. Raises the errors of
`OsDisk`, and `InvalidInput` for a path outside the root.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

from quire.core.errors import InvalidInput
from quire.durable.files import DiskLayer, File, FileLayer, OsDisk

SECTOR_BYTES = 512


class CrashOutcome(Enum):
    """What power loss did to one pending change."""

    KEEP = "keep"
    DROP = "drop"
    GARBLE = "garble"


Chooser = Callable[[Sequence[CrashOutcome]], CrashOutcome]
_EITHER = (CrashOutcome.KEEP, CrashOutcome.DROP)
_ANY = (CrashOutcome.KEEP, CrashOutcome.DROP, CrashOutcome.GARBLE)


def keep_all(_options: Sequence[CrashOutcome]) -> CrashOutcome:
    """Keep everything: the mildest crash, a killed process on a machine that stays up."""
    return CrashOutcome.KEEP


def drop_all(_options: Sequence[CrashOutcome]) -> CrashOutcome:
    """Drop everything that was not synced."""
    return CrashOutcome.DROP


def every_chooser() -> Iterator[Chooser]:
    """Yield choosers that together take every path through the decisions. Use each for one crash before the next is drawn.

    >>> seen = []
    >>> for choose in every_chooser():
    ...     seen.append((choose(_EITHER).value, choose(_EITHER).value))
    >>> seen
    [('keep', 'keep'), ('keep', 'drop'), ('drop', 'keep'), ('drop', 'drop')]
    """
    plan: list[int] = []
    while True:
        widths: list[int] = []

        def choose(options: Sequence[CrashOutcome], plan: list[int] = plan, widths: list[int] = widths) -> CrashOutcome:
            step = len(widths)
            widths.append(len(options))
            return options[plan[step] if step < len(plan) else 0]

        yield choose
        taken = (plan + [0] * len(widths))[: len(widths)]
        while taken and taken[-1] == widths[len(taken) - 1] - 1:
            taken.pop()
        if not taken:
            return
        taken[-1] += 1
        plan = taken


@dataclass(slots=True)
class _Write:
    offset: int
    data: bytes


@dataclass(slots=True)
class _Resize:
    size: int
    grow_only: bool


@dataclass(slots=True, eq=False)
class _Inode:
    durable: bytearray = field(default_factory=bytearray)
    pending: list[_Write | _Resize] = field(default_factory=list)
    mapped: bool = False
    """Whether the descriptor was requested: bytes may then change without a call of this class."""
    real: str = ""
    """A path at which the live bytes can be read; empty if there is none."""


@dataclass(slots=True, eq=False)
class _Directory:
    durable: dict[str, _Node] = field(default_factory=dict)
    live: dict[str, _Node] = field(default_factory=dict)


_Node = _Inode | _Directory


@dataclass(slots=True)
class _Edit:
    """A name set in a directory, or removed from it (`node=None`)."""

    directory: _Directory
    name: str
    node: _Node | None


class CrashDisk(DiskLayer):
    """A `Disk` over a real directory that can crash. What exists at construction counts as durable."""

    def __init__(self, root: str) -> None:
        self.root = os.path.abspath(root)
        super().__init__(OsDisk())
        self._lock = threading.RLock()
        self._changes: list[list[_Edit]] = []
        os.makedirs(self.root, exist_ok=True)
        self._tree = _load(self.root, {})

    def path(self, *parts: str) -> str:
        """Return an absolute path below the root."""
        return os.path.join(self.root, *parts)

    def crash(self, target: str, choose: Chooser) -> CrashDisk:
        """Build in `target`, a new directory, what the disk could hold if power were lost now. This disk stays usable."""
        with self._lock:
            tree = _Crash(choose, self._changes).tree(self._tree)
        os.makedirs(target)
        _store(tree, target, {})
        return CrashDisk(target)

    def open(self, path: str, *, create: bool = False, exclusive: bool = False, write: bool = True) -> CrashFile:
        with self._lock:
            parent, name = self._parent(path)
            inner = self._inner.open(path, create=create, exclusive=exclusive, write=write)
            node = parent.live.get(name)
            if node is None:
                node = _Inode(real=path)
                self._change(_Edit(parent, name, node))
            assert isinstance(node, _Inode), path
            return CrashFile(inner, node, self._lock)

    def make_dirs(self, path: str) -> None:
        with self._lock:
            directory, where = self._tree, self.root
            for name in self._parts(path):
                where, above = os.path.join(where, name), where
                if not os.path.isdir(where):
                    os.mkdir(where)
                    self._change(_Edit(directory, name, _Directory()))
                    self.sync_dir(above)
                below = directory.live[name]
                assert isinstance(below, _Directory), where
                directory = below

    def rename(self, source: str, target: str) -> None:
        with self._lock:
            (old_parent, old), (new_parent, new) = self._parent(source), self._parent(target)
            self._inner.rename(source, target)
            node = old_parent.live[old]
            if node is new_parent.live.get(new):
                return  # two names of one file: POSIX defines the rename as a no-op
            replaced = new_parent.live.get(new)
            if isinstance(replaced, _Inode):
                replaced.real = ""
            if isinstance(node, _Inode):
                node.real = target
            self._change(_Edit(new_parent, new, node), _Edit(old_parent, old, None))

    def link(self, source: str, target: str) -> None:
        with self._lock:
            (old_parent, old), (new_parent, new) = self._parent(source), self._parent(target)
            self._inner.link(source, target)
            self._change(_Edit(new_parent, new, old_parent.live[old]))

    def remove(self, path: str) -> None:
        with self._lock:
            parent, name = self._parent(path)
            node = parent.live.get(name)
            if isinstance(node, _Inode):
                _notice_mapped(node)
                node.real = ""
            self._inner.remove(path)
            self._change(_Edit(parent, name, None))

    def remove_dir(self, path: str) -> None:
        with self._lock:
            parent, name = self._parent(path)
            self._inner.remove_dir(path)
            self._change(_Edit(parent, name, None))

    def sync_dir(self, path: str) -> None:
        with self._lock:
            directory = self._tree
            for name in self._parts(path):
                below = directory.live.get(name)
                if not isinstance(below, _Directory):
                    raise FileNotFoundError(path)
                directory = below
            for number, edits in enumerate(self._changes):
                # In a rename between directories, the old name is removed durably only after the new one is durable.
                while edits and edits[0].directory is directory:
                    self._make_durable(edits.pop(0), self._changes[:number])
            self._changes = [edits for edits in self._changes if edits]

    def _make_durable(self, edit: _Edit, earlier: list[list[_Edit]]) -> None:
        _apply(edit.directory.durable, edit)
        for edits in earlier:  # a removal of this name that waits for a new one must not remove this file
            edits[1:] = [held for held in edits[1:] if (held.directory, held.name) != (edit.directory, edit.name)]

    def _change(self, *edits: _Edit) -> None:
        for edit in edits:
            _apply(edit.directory.live, edit)
        self._changes.append(list(edits))

    def _parts(self, path: str) -> list[str]:
        relative = os.path.relpath(os.path.abspath(path), self.root)
        if relative.split(os.sep)[0] == os.pardir:
            raise InvalidInput("the path is outside the crash disk", path=path, root=self.root)
        return [] if relative == os.curdir else relative.split(os.sep)

    def _parent(self, path: str) -> tuple[_Directory, str]:
        *above, name = self._parts(path)
        directory = self._tree
        for part in above:
            below = directory.live.get(part)
            if not isinstance(below, _Directory):
                raise FileNotFoundError(path)
            directory = below
        return directory, name


class CrashFile(FileLayer):
    """A `File` of a `CrashDisk`."""

    __slots__ = ("_inode", "_lock")

    def __init__(self, inner: File, inode: _Inode, lock: threading.RLock) -> None:
        super().__init__(inner)
        self._inode = inode
        self._lock = lock

    def write_at(self, data: bytes | bytearray | memoryview, offset: int) -> None:
        with self._lock:
            self._inner.write_at(data, offset)
            if len(data):  # an empty write does not even change the size
                self._inode.pending.append(_Write(offset, bytes(data)))

    def truncate(self, size: int) -> None:
        with self._lock:
            self._inner.truncate(size)
            self._inode.pending.append(_Resize(size, grow_only=False))

    def allocate(self, size: int) -> None:
        with self._lock:
            self._inner.allocate(size)
            self._inode.pending.append(_Resize(size, grow_only=True))

    def sync(self) -> None:
        with self._lock:
            inode = self._inode
            if inode.mapped:
                inode.durable = bytearray(self._inner.read_at(self._inner.size(), 0))
            else:
                for op in inode.pending:
                    _play(inode.durable, op, keep_all)
            inode.pending.clear()

    def fileno(self) -> int:
        self._inode.mapped = True
        return self._inner.fileno()

    def __enter__(self) -> CrashFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Crash:
    """One possible outcome of a power loss."""

    def __init__(self, choose: Chooser, changes: list[list[_Edit]]) -> None:
        self._choose = choose
        self._names: dict[int, dict[str, _Node]] = {}
        self._contents: dict[int, bytes] = {}
        for edits in changes:
            self._decide(edits)

    def tree(self, root: _Directory) -> dict[str, object]:
        """Return the surviving names below `root`: nested dicts for directories, (inode number, bytes) for files."""
        survivors: dict[str, object] = {}
        for name, node in sorted(self._entries(root).items()):
            if isinstance(node, _Directory):
                survivors[name] = self.tree(node)
            else:
                survivors[name] = (id(node), self._content(node))
        return survivors

    def _decide(self, edits: list[_Edit]) -> None:
        first, *rest = edits
        if self._choose(_EITHER) is not CrashOutcome.KEEP:
            return
        _apply(self._entries(first.directory), first)
        for edit in rest:
            if edit.directory is first.directory or self._choose(_EITHER) is CrashOutcome.KEEP:
                _apply(self._entries(edit.directory), edit)

    def _entries(self, directory: _Directory) -> dict[str, _Node]:
        return self._names.setdefault(id(directory), dict(directory.durable))

    def _content(self, inode: _Inode) -> bytes:
        if id(inode) not in self._contents:
            _notice_mapped(inode)
            data = bytearray(inode.durable)
            # In the order of the writes: a later write that is kept lies over an earlier one, whatever became of that.
            for op in inode.pending:
                _play(data, op, self._choose)
            self._contents[id(inode)] = bytes(data)
        return self._contents[id(inode)]


def _apply(entries: dict[str, _Node], edit: _Edit) -> None:
    if edit.node is None:
        entries.pop(edit.name, None)
    else:
        entries[edit.name] = edit.node


def _play(data: bytearray, op: _Write | _Resize, choose: Chooser) -> None:
    """Apply `op` to `data`, as far as the chooser keeps it."""
    if isinstance(op, _Resize):
        unchanged = op.size == len(data) or (op.grow_only and op.size < len(data))
        if not unchanged and choose(_EITHER) is CrashOutcome.KEEP:
            _set_size(data, op.size)
        return
    end = op.offset + len(op.data)
    start = op.offset
    while start < end:
        stop = min(end, (start // SECTOR_BYTES + 1) * SECTOR_BYTES)
        outcome = choose(_ANY)
        if outcome is not CrashOutcome.DROP:
            piece = op.data[start - op.offset : stop - op.offset]
            if outcome is CrashOutcome.GARBLE:
                piece = hashlib.shake_128(piece).digest(len(piece))
            if len(data) < start:
                _set_size(data, start)
            data[start:stop] = piece
        start = stop
    if len(data) < end and choose(_EITHER) is CrashOutcome.KEEP:
        _set_size(data, end)


def _set_size(data: bytearray, size: int) -> None:
    if size < len(data):
        del data[size:]
    else:
        data.extend(bytes(size - len(data)))


def _notice_mapped(inode: _Inode) -> None:
    """Turn bytes that changed through a mapping into pending writes."""
    if not inode.mapped or not os.path.exists(inode.real):
        return
    with OsDisk().open(inode.real, write=False) as file:
        live = file.read_at(file.size(), 0)
    known = bytearray(inode.durable)
    for op in inode.pending:
        _play(known, op, keep_all)
    for start in range(0, len(live), SECTOR_BYTES):
        sector = live[start : start + SECTOR_BYTES]
        before = bytes(known[start : start + SECTOR_BYTES]).ljust(len(sector), b"\0")
        changed = [place for place, byte in enumerate(sector) if byte != before[place]] if before != sector else []
        if changed:  # only these bytes may be garbled, as by `write_at`: the others were not written
            first, last = changed[0], changed[-1] + 1
            inode.pending.append(_Write(start + first, sector[first:last]))


def _load(path: str, loaded: dict[int, _Inode]) -> _Directory:
    directory = _Directory()
    with os.scandir(path) as entries:
        for entry in entries:
            node: _Node
            if entry.is_dir(follow_symlinks=False):
                node = _load(entry.path, loaded)
            elif (number := entry.inode()) in loaded:  # another name of the same file
                node = loaded[number]
            else:
                with OsDisk().open(entry.path, write=False) as file:
                    node = loaded[number] = _Inode(durable=bytearray(file.read_at(file.size(), 0)), real=entry.path)
            directory.durable[entry.name] = directory.live[entry.name] = node
    return directory


def _store(tree: dict[str, object], path: str, written: dict[int, str]) -> None:
    for name, node in tree.items():
        where = os.path.join(path, name)
        if isinstance(node, dict):
            os.mkdir(where)
            _store(node, where, written)
            continue
        assert isinstance(node, tuple)
        inode, data = node
        if inode in written:
            os.link(written[inode], where)
        else:
            written[inode] = where
            with open(where, "wb") as file:
                file.write(data)
