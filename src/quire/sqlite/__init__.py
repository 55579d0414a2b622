"""SQLite on quire: import, export and follow ordinary files, read snapshots from any process, and use a DB-API module."""

from typing import TYPE_CHECKING

from quire.core.lazy import lazy_names

if TYPE_CHECKING:
    from quire.sqlite import dbapi as dbapi
    from quire.sqlite.exporting import Exported, export_file
    from quire.sqlite.files import open_reader
    from quire.sqlite.follow import Follower
    from quire.sqlite.importing import Imported, import_file

__all__ = [
    "Exported",
    "Follower",
    "Imported",
    "dbapi",
    "export_file",
    "import_file",
    "open_reader",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "dbapi": "quire.sqlite.dbapi",
            "Exported": "quire.sqlite.exporting",
            "export_file": "quire.sqlite.exporting",
            "Follower": "quire.sqlite.follow",
            "Imported": "quire.sqlite.importing",
            "import_file": "quire.sqlite.importing",
            "open_reader": "quire.sqlite.files",
        },
    )
