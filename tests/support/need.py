"""A part that a test needs: where it is missing the test is skipped with the reason, under CI it fails."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest


def missing(reason: str) -> NoReturn:
    """Skip, or under CI=true fail: there every part has to be there."""
    if os.environ.get("CI", "").lower() in ("1", "true"):
        pytest.fail(f"under CI nothing may be skipped: {reason}", pytrace=False)
    pytest.skip(reason)
