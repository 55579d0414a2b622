"""Spark on quire: sessions with the data sources registered, the options they need, saving and bulk loading."""

from typing import TYPE_CHECKING

from quire.core.lazy import lazy_names

if TYPE_CHECKING:
    from quire.spark.access import options_of
    from quire.spark.catalog import RegisteredDatabase, register
    from quire.spark.runner import SparkRunner
    from quire.spark.save_table import save
    from quire.spark.sessions import attach, session
    from quire.spark.sources.kv_load import bulk_load
    from quire.spark.stores import read_stores, run_stores

__all__ = [
    "RegisteredDatabase",
    "SparkRunner",
    "attach",
    "bulk_load",
    "options_of",
    "read_stores",
    "register",
    "run_stores",
    "save",
    "session",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "options_of": "quire.spark.access",
            "RegisteredDatabase": "quire.spark.catalog",
            "register": "quire.spark.catalog",
            "SparkRunner": "quire.spark.runner",
            "save": "quire.spark.save_table",
            "attach": "quire.spark.sessions",
            "session": "quire.spark.sessions",
            "bulk_load": "quire.spark.sources.kv_load",
            "read_stores": "quire.spark.stores",
            "run_stores": "quire.spark.stores",
        },
    )
