"""SQLSTATE codes that the pooler itself sends or recognises.

Source: PostgreSQL documentation, appendix A. Nothing here decides anything beyond which class a code is in.
"""

from __future__ import annotations

from typing import Final

CONNECTION_FAILURE: Final = "08006"
FEATURE_NOT_SUPPORTED: Final = "0A000"
INVALID_PARAMETER_VALUE: Final = "22023"
INVALID_AUTHORIZATION: Final = "28000"
INVALID_PASSWORD: Final = "28P01"
INVALID_CATALOG_NAME: Final = "3D000"
SYNTAX_ERROR: Final = "42601"
INVALID_NAME: Final = "42602"
UNDEFINED_OBJECT: Final = "42704"
TOO_MANY_CONNECTIONS: Final = "53300"

_PERMANENT_LOGIN_FAULTS: Final = frozenset(
    {INVALID_AUTHORIZATION, INVALID_PASSWORD, INVALID_CATALOG_NAME, UNDEFINED_OBJECT, INVALID_PARAMETER_VALUE}
)


def is_permanent_login_fault(code: str) -> bool:
    """Whether a server's refusal of a login will not go away by trying again soon (wrong password, no such
    database or role), as opposed to a server that is full, starting or stopping."""
    return code in _PERMANENT_LOGIN_FAULTS
