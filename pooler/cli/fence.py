"""`pooler fleet fence`, `freeze` and `thaw`: what an operator may stop, whoever leads."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pooler.cli.options import (
    ConfigOption,
    DbArgument,
    EtcdOption,
    FleetOption,
    JsonOption,
    PrefixOption,
)

if TYPE_CHECKING:
    from coordinator.revoking import Fencing
    from pooler.cli.reach import Where

EvidenceOption = Annotated[
    str | None, typer.Option("--evidence", metavar="TEXT", help="Why; kept for ever.")]


def fence(
    worker: Annotated[str, typer.Argument(
        metavar="WORKER", help="A worker's boot id, or its beginning, as `pooler ledger show` has it.")],
    evidence: EvidenceOption = None,
    timeout: Annotated[str, typer.Option(
        "--timeout", metavar="DURATION", help="How long to wait for the proofs that they are gone.")] = "30s",
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Revoke a worker's lease and terminate its sessions at the servers, each by its process and its start.

    For a worker that hangs, or is cut off and must not go on. Its clients lose their transactions. A worker
    that lives registers anew and may open other sessions; stop it first if it must not. Takes an admin
    permit.

    Exits 0 when none of the sessions is left, 1 when one is not proven gone in time (it stays taken and is
    looked at by the leader) or cannot be terminated.

    Example: pooler fleet fence 3f9c21aa --evidence 'hangs since 02:58, OPS-44'
    """
    import trio

    from coordinator.looks import NEEDS_GRANT
    from pooler.cli.options import seconds_of
    from pooler.cli.out import print_json
    from pooler.cli.reach import Where

    seconds = seconds_of("--timeout", timeout)
    done = trio.run(_fence, Where(config), worker, _words(evidence), seconds, yes)
    left = [f"{db}: {text}" for db, texts in done.left.items() for text in texts]
    terminated = [f"{db}: {each}" for db, permits in done.terminated.items() for each in permits]
    if as_json:
        print_json({"worker": done.worker, "terminated": terminated, "left": left, "failed": done.failed})
    else:
        print(f"{done.worker}: its lease is revoked; {len(terminated)} sessions terminated, {len(left)} left")
        for text in left:
            print(f"pooler: not proven gone: {text}", file=sys.stderr)
        for why in done.failed.values():
            print(f"pooler: not terminated: {why} ({NEEDS_GRANT})", file=sys.stderr)
    raise typer.Exit(done.exit_code)


def _words(evidence: str | None) -> str:
    """None given is none; an empty one is a mistake, of a script most likely. Raises UsageFault."""
    if evidence is not None and not evidence.strip():
        from pooler.errors import UsageFault

        raise UsageFault("--evidence: is empty: say why, or leave it out")
    return evidence or ""


async def _fence(where: Where, name: str, evidence: str, seconds: float, yes: bool) -> Fencing:
    from contextlib import AsyncExitStack

    from coordinator.revoking import NotThis, fence_worker, find_worker
    from pooler.cli.reach import now_us, operator_name, reach
    from pooler.errors import UsageFault

    async with reach(where) as reached:
        ledgers = {db: await reached.whole_ledger(db) for db in reached.databases}
        try:
            boot_id = await find_worker(reached.store, reached.keys, ledgers.values(), name)
        except NotThis as why:
            raise UsageFault(str(why)) from None
        if not yes:
            _ask(f"the lease of worker {boot_id} is revoked and all its sessions are terminated. Go on?")
        async with AsyncExitStack() as open_:
            eyes = {db: await open_.enter_async_context(reached.eyes(db)) for db in ledgers}
            return await fence_worker(
                reached.store, reached.keys, ledgers, eyes, boot_id, who=operator_name(), evidence=evidence,
                now_us=now_us, seconds_max=seconds)


def _ask(question: str) -> None:
    from pooler.errors import UsageFault

    if not sys.stdin.isatty():
        raise UsageFault("nobody is here to be asked: repeat it with --yes")
    typer.confirm(question, abort=True, err=True)


def freeze(
    db: DbArgument,
    evidence: EvidenceOption = None,
    config: ConfigOption = None,
    etcd: EtcdOption = None,
    fleet: FleetOption = None,
    prefix: PrefixOption = "pooler",
) -> None:
    """Let a ledger grow no more, until it is thawed: no new session for anybody but commands.

    Clients are served on by the sessions that there are, and none of those is closed by choice. Who needs
    another waits within its time, and hears that the ledger is frozen.

    Example: pooler fleet freeze orders --evidence 'the server is being looked at, OPS-45'
    """
    _set((config, etcd, fleet, prefix), db, True, evidence)


def thaw(
    db: DbArgument,
    evidence: EvidenceOption = None,
    config: ConfigOption = None,
    etcd: EtcdOption = None,
    fleet: FleetOption = None,
    prefix: PrefixOption = "pooler",
) -> None:
    """Let a frozen ledger grow again.

    Example: pooler fleet thaw orders
    """
    _set((config, etcd, fleet, prefix), db, False, evidence)


def _set(
    told: tuple[Path | None, str | None, str | None, str], name: str, frozen: bool, evidence: str | None
) -> None:
    import trio

    from pooler.cli.reach import Where

    db, changed = trio.run(_carry_out, Where(*told), name, frozen, _words(evidence))
    word = "frozen: it grows no more until `pooler fleet thaw`" if frozen else "thawed: it may grow again"
    print(f"{db}: {word}" if changed else f"{db}: {'is frozen' if frozen else 'is not frozen'} already")


async def _carry_out(where: Where, name: str, frozen: bool, evidence: str) -> tuple[str, bool]:
    from coordinator.freezing import NoLedger, set_frozen
    from pooler.cli.reach import now_us, operator_name, reach
    from pooler.errors import LedgerLost

    async with reach(where) as reached:
        db = reached.db(name)
        await reached.whole_ledger(db)
        try:
            return db, await set_frozen(
                reached.store, reached.keys, db, frozen, who=operator_name(), evidence=evidence,
                now_us=now_us)
        except NoLedger as why:
            raise LedgerLost(str(why)) from None
