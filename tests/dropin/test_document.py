"""The page about migrating says what the importer does."""

from __future__ import annotations

from pooler.dropin.document import with_table
from tests.repo.sources import ROOT

PAGE = ROOT / "docs" / "migrating-from-pgbouncer.md"


def test_the_table_of_settings_is_current() -> None:
    page = PAGE.read_text()
    assert with_table(page) == page, f"python -m pooler.dropin.document < {PAGE.name}"
