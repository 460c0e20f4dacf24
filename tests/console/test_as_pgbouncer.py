"""What a client is told in PgBouncer's words."""

from __future__ import annotations

import pytest

from pooler.console.as_pgbouncer import reworded_login
from pooler.errors import LoginRefused

IN_CLEAR = 'no pg_hba.conf entry for host "127.0.0.1", user "u", database "d", no encryption'


@pytest.mark.parametrize(("auth_type", "told"), [("md5", "SSL required"), ("hba", IN_CLEAR)])
def test_who_comes_in_clear_hears_of_an_hba_file_only_where_there_is_one(auth_type: str, told: str) -> None:
    assert str(reworded_login(LoginRefused(IN_CLEAR), auth_type)) == told
