"""Tests of node-postgres and postgres.js by what of theirs cannot last beyond a transaction, as patterns.

A file of node-postgres ends at its first failure: its name covers what would have come behind.
"""

from __future__ import annotations

from typing import Final

_CLIENT: Final = (
    "api", "array", "error-handling", "huge-numeric", "json-type-parsing", "no-data", "parse-int-8",
    "prepared-statement", "query-column-names", "query-error-handling", "result-metadata", "simple-query",
    "type-coercion", "type-parser-override")
_ISSUES: Final = ("1105", "131", "199", "2056", "2862", "507", "600", "675", "699")
TEMPORARY: Final = (
    *(f"pg/integration/client/{name}-tests.js*" for name in _CLIENT),
    *(f"pg/integration/gh-issues/{name}-tests.js*" for name in _ISSUES),
    "pg-cursor/cursor::*")
LISTEN: Final = ("pg/integration/client/notice-tests.js*",)
IDLE_END: Final = ("pg/integration/connection-pool/error-tests.js*", "pg/integration/gh-issues/130-tests.js*")

JS_TEMPORARY: Final = ("a reserved connection keeps its session",)
JS_LISTEN: Final = ("listen and notify",)
