"""SQLite's constants under the names that sqlite3 gives them: result codes, authorizer actions, limits, settings.

They are taken from apsw, which has all of SQLite's.
"""

from __future__ import annotations

import apsw

_GROUPS = (
    apsw.mapping_result_codes,
    apsw.mapping_extended_result_codes,
    apsw.mapping_authorizer_return_codes,
    apsw.mapping_authorizer_function,
    apsw.mapping_limits,
    apsw.mapping_db_config,
)

CONSTANTS: dict[str, int] = {
    name: value
    for group in _GROUPS
    for name, value in group.items()
    if isinstance(name, str) and isinstance(value, int)
}
"""Name → value."""
