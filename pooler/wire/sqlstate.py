"""SQLSTATE codes that the pooler itself sends or recognises.

Source: PostgreSQL documentation, appendix A. Nothing here decides anything beyond which class a code is in.
"""

from __future__ import annotations

from typing import Final

SUCCESS: Final = "00000"
CONNECTION_FAILURE: Final = "08006"
OUTCOME_UNKNOWN: Final = "08007"
PROTOCOL_VIOLATION: Final = "08P01"
FEATURE_NOT_SUPPORTED: Final = "0A000"
INVALID_PARAMETER_VALUE: Final = "22023"
INVALID_SQL_STATEMENT_NAME: Final = "26000"
INVALID_AUTHORIZATION: Final = "28000"
INVALID_PASSWORD: Final = "28P01"
INVALID_CATALOG_NAME: Final = "3D000"
SYNTAX_ERROR: Final = "42601"
UNDEFINED_OBJECT: Final = "42704"
TOO_MANY_CONNECTIONS: Final = "53300"
QUERY_CANCELED: Final = "57014"
ADMIN_SHUTDOWN: Final = "57P01"
CRASH_SHUTDOWN: Final = "57P02"
CANNOT_CONNECT_NOW: Final = "57P03"
SYSTEM_ERROR: Final = "58000"

_PERMANENT_LOGIN_FAULTS: Final = frozenset(
    {INVALID_AUTHORIZATION, INVALID_PASSWORD, INVALID_CATALOG_NAME, UNDEFINED_OBJECT, INVALID_PARAMETER_VALUE}
)


def is_permanent_login_fault(code: str) -> bool:
    """Whether a server's refusal of a login will not go away by trying again soon (wrong password, no such
    database or role), as opposed to a server that is full, starting or stopping."""
    return code in _PERMANENT_LOGIN_FAULTS
