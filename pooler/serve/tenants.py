"""Tenant and class of a client: by the first rule of `tenants` that fits it, and by its own choice where no
rule has given one. Decides nothing else, and keeps nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from pooler.relay.asking import Asked
from pooler.settings import TenantMatch, TenantSettings
from pooler.wire.own_parameters import CLASS, DEADLINE, NO_DEADLINE, TENANT, TICKET, deadline_seconds


def who_asks(rules: Iterable[TenantSettings], facts: Mapping[str, str], own: Mapping[str, str]) -> Asked:
    """`facts`: what a rule can match; `own`: what the client chose at its start, checked.

    What the rule gives is given: a client cannot choose that otherwise, unless the rule lets it
    (`client_may_choose: true`), nor anything of a rule that says it may not. Without a rule's word or its
    own, the tenant is the user and the class the policy's first.
    """
    rule = next((each for each in rules if _fits(each.match, facts)), None)
    given = {} if rule is None else {
        name: value for name, value in ((TENANT, rule.tenant), (CLASS, rule.class_name)) if value is not None}
    may_choose = rule.client_may_choose if rule is not None else None
    fixed = frozenset() if may_choose else frozenset(given if may_choose is None else (TENANT, CLASS))
    chosen = {name: value for name, value in own.items() if name not in fixed}
    said = {TENANT: facts["user"], CLASS: ""} | given | chosen
    return Asked(said[TENANT], said[CLASS], deadline_seconds(said.get(DEADLINE, NO_DEADLINE)),
                 said.get(TICKET, ""), fixed)


def _fits(match: TenantMatch, facts: Mapping[str, str]) -> bool:
    patterns = match.model_dump(exclude_none=True)
    return all(fnmatchcase(facts[name], pattern) for name, pattern in patterns.items())
