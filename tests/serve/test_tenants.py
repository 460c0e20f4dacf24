"""Who is asking: the first rule that fits, and what a client may choose."""

from __future__ import annotations

from typing import Any

import pytest

from pooler.serve.tenants import who_asks
from pooler.settings import TenantSettings


@pytest.mark.parametrize(("rule", "own", "expected"), [
    (None, {}, ("u", "")),
    (None, {"tenant": "x", "class": "c"}, ("x", "c")),
    ({"match": {}, "tenant": "t"}, {"tenant": "x", "class": "c"}, ("t", "c")),
    ({"match": {}, "tenant": "t", "client_may_choose": True}, {"tenant": "x"}, ("x", "")),
    ({"match": {}, "client_may_choose": False}, {"tenant": "x", "class": "c"}, ("u", "")),
    ({"match": {"pooler_tenant": "x*"}, "class": "k"}, {"tenant": "x1", "class": "c"}, ("x1", "k")),
    ({"match": {"pooler_tenant": "x*"}, "class": "k"}, {"tenant": "y", "class": "c"}, ("y", "c")),
])
def test_what_a_rule_gives_counts(
    rule: dict[str, Any] | None, own: dict[str, str], expected: tuple[str, str]
) -> None:
    rules = [] if rule is None else [TenantSettings.model_validate(rule)]
    facts = {"user": "u", "database": "d", "application_name": "", "client_address": "",
             "pooler_tenant": own.get("tenant", ""), "pooler_class": own.get("class", "")}
    assert who_asks(rules, facts, own)[:2] == expected
