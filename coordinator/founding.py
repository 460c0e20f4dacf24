"""The first start of a ledger: its head, its first backend epoch, its first policy generation.

Each is created only if it does not exist, so that any number of coordinators may try. A policy file that
differs from the active generation changes nothing: it is reported, and the active one holds.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import structlog
import trio

from coordinator.events import Event
from coordinator.fleet_policies import can_fail_over, fleet_demands, hosts_of
from coordinator.ledger.claims import Claims, FleetClaims, claims_from, claims_txn
from coordinator.ledger.keys import DbKeys, FleetKeys
from coordinator.ledger.proofs import Look
from coordinator.ledger.record import Alias, Backend, Epoch, EpochState, LedgerHead, LedgerState
from coordinator.ledger.recovery import is_ours, roles_of
from coordinator.looks import Eyes, LookFailed
from coordinator.placement import Demand, crowded, room_at
from coordinator.policy import Policy, PolicyRefused, load_policy
from coordinator.policy_moves import MoveRefused, is_published, publication, swap
from coordinator.publishing import read_standing
from coordinator.remembered import Remembered
from coordinator.room import look_at_hosts
from coordinator.spec import DatabaseSpec
from coordinator.store.api import Lost, Put, Store, Txn, absent
from coordinator.topology import FIRST_START
from coordinator.view import View

ANSWER_SECONDS_MAX = 2.0  # of a host that nobody may look at, where there are others
LOOK_AGAIN_SECONDS = 10.0  # after a policy for which there was no room

_log = structlog.get_logger("coordinator.founding")


@dataclass(frozen=True, slots=True)
class Found:
    """The backend an epoch begins with, and the look that showed it (None: no monitor login)."""

    backend: Backend
    look: Look | None


async def first_that_answers(hosts: Sequence[str]) -> str:
    """The first host that takes a connection; of several, none of which does, the first. A name that cannot
    be resolved takes none."""
    for host in hosts if len(hosts) > 1 else ():
        name, _, port = host.rpartition(":")
        with suppress(OSError), trio.move_on_after(ANSWER_SECONDS_MAX):
            async with await trio.open_tcp_stream(name.strip("[]"), int(port)):
                return host
    return hosts[0]


class Founder:
    """Brings the ledgers of this coordinator into being, step by step, as far as each step can go."""

    def __init__(
        self, store: Store, keys: FleetKeys, ledgers: dict[str, tuple[DatabaseSpec, ...]], eyes: Eyes, *,
        patroni: bool = False, remembered: Remembered | None = None,
        now_us: Callable[[], int] = lambda: time.time_ns() // 1000,
    ) -> None:
        self._store = store
        self._keys = keys
        self._ledgers = ledgers
        self._eyes = eyes
        self._patroni = patroni
        self._remembered = remembered
        self._now_us = now_us
        self._said: dict[tuple[str, str], str] = {}
        self._look_again_at = float("-inf")

    @property
    def refused(self) -> dict[str, str]:
        """Why a policy file was last refused, by ledger."""
        return {db: why for (event, db), why in self._said.items() if event == Event.POLICY_REFUSED}

    async def found(self, view: View) -> bool:
        """Creates what `view` lacks; True if something was written.

        Raises StoreUnavailable, StoreUnknown.
        """
        if view.lost or not view.reachable:
            return False
        keys, specs = self._keys.db(view.db), self._ledgers[view.db]
        written = False
        if view.head is not None and view.head.rebuilt and view.head.state is LedgerState.RECOVERING and (
                await self._keep_policy(view, keys)):
            return True
        if view.alias is None:
            written |= await self._publish(keys, specs)
        else:
            self._compare_policy(view, specs)
        if view.epoch is None or view.head is None:
            written |= await self._begin(view, keys, specs)
        return written

    async def _begin(self, view: View, keys: DbKeys, specs: Sequence[DatabaseSpec]) -> bool:
        found = await self.find_backend(view.db)
        if found is None:
            return False
        compares, puts = [], []
        if view.epoch is None:
            epoch = Epoch(1, EpochState.ACTIVE, found.backend, self._now_us(), FIRST_START)
            compares.append(absent(keys.epoch()))
            puts.append(Put(keys.epoch(), epoch.encode()))
        if view.head is None:
            elsewhere = (await read_claims(self._store, self._keys)).besides(view.db)
            state = LedgerState.RECOVERING if _ours(found, specs, elsewhere) else LedgerState.ACTIVE
            head = LedgerHead(secrets.token_hex(16), state, secrets.token_hex(4))
            compares.append(absent(keys.ledger()))
            puts.append(Put(keys.ledger(), head.encode()))
        await self._store.txn(Txn(tuple(compares), tuple(puts)))
        if view.head is None:
            _log.info(Event.LEDGER_CREATED, database=view.db, backend=found.backend.address)
            self._name_strangers(view.db, found, specs, elsewhere)
        return True

    async def find_backend(self, db: str) -> Found | None:
        """The host to begin with: the primary for role write, for read a standby if one answers."""
        specs = self._ledgers[db]
        hosts = tuple(dict.fromkeys(host for spec in specs for host in spec.hosts))
        if not any(spec.monitor for spec in specs):
            self._say(Event.NO_BACKEND_FOUND, db, "no monitor login: the first host is taken on trust, "
                                                  "and no session in SESSION_UNKNOWN can be looked up")
            return Found(Backend(await first_that_answers(hosts)), None)
        faults, looks = [], []
        for host in hosts:
            try:
                looks.append(await self._eyes.look(host))
            except LookFailed as failed:
                faults.append(str(failed))
        writes = specs[0].role == "write"
        fit = [look for look in looks if not (writes and look.backend.in_recovery)]
        fit.sort(key=_preference)  # stable: hosts keep their order
        if not fit:
            faults.extend(f"{look.backend.address}: is in recovery" for look in looks)
            self._say(Event.NO_BACKEND_FOUND, db, "; ".join(faults))
            return None
        return Found(fit[0].backend, fit[0])

    async def _keep_policy(self, view: View, keys: DbKeys) -> bool:
        """The policy does not go back by a rebuild: what this host knew to grant in the lost ledger does,
        unless etcd has a later one, or another under that number. True: it was written."""
        known = self._remembered.policy(view.db) if self._remembered is not None else None
        if known is None or (view.alias is not None and view.alias.granting >= known[0]):
            return False
        generation, stored = known
        standing = await read_standing(self._store, keys)
        there = standing.generations.get(generation)
        if there not in (None, stored):
            self._say(Event.POLICY_REFUSED, view.db,
                      f"generation {generation} was in force, and is published with other content by now")
            return False
        key, moved = keys.policy(generation), swap(standing, Alias(active=generation), keys)
        if there is None:
            moved = Txn((*moved.compares, absent(key)), (Put(key, stored), *moved.puts))
        await self._store.txn(moved)
        _log.info(Event.POLICY_PUBLISHED, database=view.db, generation=generation)
        return True

    async def _publish(self, keys: DbKeys, specs: Sequence[DatabaseSpec]) -> bool:
        text = next((spec.policy for spec in specs if spec.policy), None)
        if text is None:
            self._say(Event.POLICY_REFUSED, keys.database, "no policy file is configured, none is published")
            return False
        try:
            policy, document = load_policy(text)
        except PolicyRefused as refused:
            self._say(Event.POLICY_REFUSED, keys.database, str(refused))
            return False
        if policy.database != keys.database:
            self._say(Event.POLICY_REFUSED, keys.database, f"database: the file is for {policy.database!r}")
            return False
        hosts = hosts_of(policy, specs)
        looks = await self._looks_with_room(keys.database, policy, hosts)
        if looks is None:
            return False
        room = min((room for look in looks if (room := room_at(look)) is not None), default=None)
        resolved = policy.resolve(
            can_fail_over=can_fail_over(specs, patroni=self._patroni), hosts=hosts, role=specs[0].role,
            room=room)
        standing = await read_standing(self._store, keys)
        try:
            known = is_published(standing, policy)
        except MoveRefused as refused:
            self._say(Event.POLICY_REFUSED, keys.database, str(refused))
            return False
        await self._store.txn(
            swap(standing, Alias(active=policy.generation), keys) if known
            else publication(standing, policy, document, resolved, keys))
        _log.info(Event.POLICY_PUBLISHED, database=keys.database, generation=policy.generation)
        return True

    async def _looks_with_room(
        self, db: str, policy: Policy, hosts: tuple[str, ...]
    ) -> Sequence[Look] | None:
        """What the servers show, where they can be reached; None if they cannot hold what it and the active
        ones promise."""
        if trio.current_time() < self._look_again_at:
            return None
        demands = await fleet_demands(self._store, self._keys, self._ledgers)
        watched = any(spec.monitor for spec in self._ledgers[db])
        looks, _ = await look_at_hosts(self._eyes, hosts if watched else ())
        system = next((look.backend.system_identifier for look in looks.values()), "")
        demands[db] = Demand(db, hosts, policy, system)
        why = crowded(demands.values(), looks).get(db)
        if why is None:
            return list(looks.values())
        self._look_again_at = trio.current_time() + LOOK_AGAIN_SECONDS
        self._say(Event.POLICY_REFUSED, db, why)
        return None

    def _compare_policy(self, view: View, specs: Sequence[DatabaseSpec]) -> None:
        """Says so, once, when the file is not what is active."""
        text = next((spec.policy for spec in specs if spec.policy), None)
        if text is None or view.alias is None or (Event.POLICY_DIFFERS, view.db) in self._said:
            return
        self._said[Event.POLICY_DIFFERS, view.db] = "compared"
        try:
            policy, _ = load_policy(text)
        except PolicyRefused as refused:
            self._say(Event.POLICY_REFUSED, view.db, str(refused))
            return
        if view.policy is not None and view.policy != policy:
            _log.warning(Event.POLICY_DIFFERS, database=view.db, file_generation=policy.generation,
                         active_generation=view.alias.granting)

    def _name_strangers(
        self, db: str, found: Found, specs: Sequence[DatabaseSpec], elsewhere: Claims
    ) -> None:
        """Sessions that were there before the ledger: it does not count them."""
        if found.look is None:
            return
        names = {spec.dbname for spec in specs}
        strangers = Counter(
            str(row.user) for row in found.look.rows
            if row.is_client and row.dbname in names and not elsewhere.has(row))
        if strangers:
            _log.warning(Event.LEDGER_STRANGERS_AT_START, database=db, sessions_by_role=dict(strangers))

    def _say(self, event: Event, db: str, why: str) -> None:
        """One line, and again only when the reason changes."""
        if self._said.get((event, db)) != why:
            self._said[event, db] = why
            _log.warning(event, database=db, why=why)


async def read_claims(store: Store, keys: FleetKeys) -> FleetClaims:
    """Which sessions at servers are whose, before there is a ledger to ask. Raises StoreUnavailable."""
    answer = await store.txn(claims_txn(keys))
    assert isinstance(answer, Lost)  # its compare cannot hold
    return claims_from(answer.reads, keys)


def _preference(look: Look) -> tuple[bool, int]:
    """Standbys (where one is fit) come first; of several primaries the one that was promoted last."""
    return not look.backend.in_recovery, 0 if look.backend.in_recovery else -look.backend.timeline


def _ours(found: Found, specs: Sequence[DatabaseSpec], elsewhere: Claims) -> int:
    """How many sessions of our roles, and of no other ledger, are there already: a ledger that does not count
    them grants too much."""
    roles = roles_of(specs)
    rows = found.look.rows if found.look is not None else ()
    return sum(is_ours(row, roles, elsewhere) for row in rows)
