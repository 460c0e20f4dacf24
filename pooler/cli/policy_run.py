"""What the `pooler policy` commands do, once their arguments are known."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trio

from coordinator.fleet_policies import can_fail_over, fleet_demands, hosts_of, policy_of
from coordinator.ledger.record import Alias
from coordinator.ledger.snapshot import Held
from coordinator.ledger.states import SessionState
from coordinator.looks import Eyes, Looker
from coordinator.opening import doors
from coordinator.placement import larger_of
from coordinator.policy import Policy, PolicyRefused, load_policy
from coordinator.policy_moves import MoveRefused, Plan, Standing
from coordinator.publishing import Checked, Mover, NoRoom, check_servers, publish, read_standing
from pooler.cli.connection_limits import statements
from pooler.cli.options import settings_of
from pooler.cli.reach import Reached, Where, reach
from pooler.errors import PoolerError

NO_MONITOR = ("the servers were not looked at, for no `monitor` login of this database is known here: the "
              "leader judges it when it grants")


class PolicyMoveRefused(PoolerError):
    """A policy was not published, or a generation not moved: nothing was changed. One line each reason."""


@dataclass(frozen=True, slots=True)
class Moved:
    """Where the policies stand. `alias` None: the time was over before all was done."""

    db: str
    alias: Alias | None
    not_checked: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Order:
    """A move. `plan` is made for the role of the database; `generation` is what it is to grant by (0: what
    did before), and is held beside the servers first; `new_counts`: what shadows counted is over."""

    plan: Callable[[str], Callable[[Standing], Plan]]
    generation: int = 0
    new_counts: bool = True
    seconds: float = float("inf")


def text_of(file: Path) -> str:
    """The file's text. Raises OSError; PolicyMoveRefused if it is none."""
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise PolicyMoveRefused(f"{file}: it is not UTF-8 text") from None


def load(file: Path) -> tuple[Policy, dict[str, Any]]:
    """The policy of a file, and its document. Raises OSError, PolicyMoveRefused."""
    try:
        return load_policy(text_of(file))
    except PolicyRefused as refused:
        raise PolicyMoveRefused("\n".join(f"{file}: {fault}" for fault in refused.faults)) from None


async def publish_file(where: Where, file: Path) -> dict[str, Any]:
    """What was done, with stable keys. Raises PolicyMoveRefused and what reaching the ledger raises."""
    policy, document = load(file)
    async with reach(where) as reached:
        db = reached.db(policy.database)
        await reached.whole_ledger(db)
        specs, keys = reached.specs_of(db), reached.keys.db(db)
        with _refusals():
            checked = await _check(reached, db, policy)
            written, alias = await publish(
                reached.store, keys, policy, document, checked,
                can_fail_over=can_fail_over(specs, patroni=bool(reached.spec.patroni)),
                hosts=hosts_of(policy, specs), role=specs[0].role if specs else "")
        return {"database": db, "generation": policy.generation, "published": written,
                "active": alias.granting, "not_checked": list(_not_checked(checked)),
                "statements": await _statements(reached, where, policy)}


async def move(where: Where, name: str, order: Order, tell: Callable[[str, int, list[Held]], None]) -> Moved:
    """Carries a move out. Raises PolicyMoveRefused and what reaching the ledger raises."""
    async with reach(where) as reached:
        db = reached.db(name)
        ledger = await reached.whole_ledger(db)
        keys = reached.keys.db(db)
        with _refusals():
            standing = await read_standing(reached.store, keys)
            wanted = policy_of(standing.generations.get(order.generation))
            plan, checked = order.plan(_role(reached, db, wanted)), Checked(not_seen={})
            if plan(standing) and wanted is not None:
                checked = await _check(reached, db, wanted)
            mover = Mover(reached.store, keys, ledger, lambda generation, left: tell(db, generation, left))
            alias = None
            with trio.move_on_after(order.seconds):
                alias = await mover.move(plan)
                if order.new_counts:
                    await mover.forget_counts()
        return Moved(db, alias, _not_checked(checked))


def left_text(left: list[Held]) -> str:
    """How many sessions have to end, and of how many nobody knows whether they have."""
    unknown = sum(held.session.state is SessionState.UNKNOWN for held in left)
    return f"{len(left)} sessions to end" + (f", {unknown} of them in SESSION_UNKNOWN" if unknown else "")


@asynccontextmanager
async def _eyes(reached: Reached, db: str) -> AsyncIterator[Eyes | None]:
    """At the servers, under an admin permit; before any policy is active there is none to have."""
    if not any(spec.monitor for spec in reached.specs_of(db)):
        yield None
        return
    standing = await read_standing(reached.store, reached.keys.db(db))
    if standing.alias.granting:
        async with reached.eyes(db) as eyes:
            yield eyes
        return
    looker = Looker(doors(reached.spec, lambda _: "pooler policy publish"),
                    provider_identity=reached.spec.node_identity == "provider", reconnects=False)
    try:
        yield looker
    finally:
        await looker.close()


async def _check(reached: Reached, db: str, policy: Policy) -> Checked:
    async with _eyes(reached, db) as eyes:
        return await check_servers(reached.store, reached.keys, policy, reached.spec.ledgers(), eyes)


@contextmanager
def _refusals() -> Iterator[None]:
    """What refuses a move, as an outcome of the command."""
    try:
        yield
    except Exception as fault:
        found = _leaf(fault)
        if isinstance(found, MoveRefused | NoRoom):
            raise PolicyMoveRefused(str(found).replace("; ", "\n")) from None
        raise


def _leaf(fault: BaseException) -> BaseException:
    while isinstance(fault, BaseExceptionGroup):
        fault = fault.exceptions[0]
    return fault


def _role(reached: Reached, db: str, policy: Policy | None) -> str:
    """By the config, or as it was when the generation was published."""
    specs = reached.specs_of(db)
    return specs[0].role if specs else policy.resolved.role if policy else ""


def _not_checked(checked: Checked) -> tuple[str, ...]:
    if checked.not_seen is None:
        return (NO_MONITOR,)
    return tuple(f"not looked at: {why}" for why in checked.not_seen.values())


async def _statements(reached: Reached, where: Where, policy: Policy) -> list[str]:
    """Of every role and database of the config that may meet there; none without a config."""
    if not reached.spec.databases:
        return []
    demands = await fleet_demands(reached.store, reached.keys, reached.spec.ledgers())
    policies = {db: demand.policy for db, demand in demands.items()}
    policies[policy.database] = larger_of(policy, policies.get(policy.database))
    return statements(settings_of(where.config), policies)
