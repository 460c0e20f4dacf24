"""`pooler ledger rebuild`: a lost ledger is made anew from what the workers and the servers hold."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from pooler.cli.options import ConfigOption, DbArgument

if TYPE_CHECKING:
    from coordinator.ledger.record import LedgerHead
    from coordinator.ledger.snapshot import LedgerSnapshot
    from coordinator.remembered import Remembered
    from pooler.cli.reach import Reached, Where

EXIT_TIMED_OUT = 4
POLL_SECONDS = 0.2


def rebuild(
    db: DbArgument,
    evidence: Annotated[str, typer.Option(
        "--evidence", metavar="TEXT", help="What happened to etcd, and why this is to be done; kept.")] = "",
    timeout: Annotated[str, typer.Option(
        "--timeout", metavar="DURATION", help="How long to wait for it to be ACTIVE.")] = "60s",
    config: ConfigOption = None,
) -> None:
    """Make a lost ledger anew: after etcd was wiped, or restored to an older state.

    The coordinators then give every session that their workers hold its slot again, and every other session
    of the pools' roles that the server shows one in SESSION_UNKNOWN. Nothing is granted meanwhile; clients
    are served on. Give the order on a host of the fleet: its run directory tells that the ledger is lost.

    Exits 0 when the ledger is ACTIVE, 1 if it is not lost and nothing was changed, or if it was lost again
    meanwhile, 4 when the time is over: the work goes on, and the same command waits for it again.

    Example: pooler ledger rebuild orders --evidence 'etcd restored from the backup of 03:00, OPS-31'
    """
    import trio

    from pooler.cli.options import seconds_of
    from pooler.cli.reach import Where
    from pooler.errors import UsageFault

    if not evidence.strip():
        raise UsageFault("--evidence: is required: what happened to this ledger?")
    seconds = seconds_of("--timeout", timeout)
    raise typer.Exit(trio.run(_rebuild, Where(config), db, evidence, seconds))


async def _rebuild(where: Where, name: str, evidence: str, seconds: float) -> int:
    import trio

    from coordinator.rebuild import NotLost, order_rebuild
    from pooler.cli.reach import now_us, operator_name, reach, remembered

    async with reach(where) as reached:
        db = reached.db(name)
        assert reached.run_dir is not None  # of a config
        known = remembered(reached.run_dir)
        line = await _policy_line(where, reached, db, known)
        print(f"{db}: {line}", flush=True)
        try:
            ordered = await order_rebuild(
                reached.store, reached.keys, db, known.seen(db), who=operator_name(),
                evidence=evidence, now_us=now_us)
        except NotLost as why:
            print(f"pooler: {why}", file=sys.stderr)
            return 1
        begun = "is being rebuilt already" if ordered.again else "is being rebuilt"
        print(f"{db}: {begun}: incarnation {ordered.head.incarnation}", flush=True)
        with trio.move_on_after(seconds):
            return await _until_active(reached, db, ordered.head)
        print(f"pooler: {db}: not ACTIVE after {seconds:g} s; it is still being rebuilt: the leader's log "
              "says what it waits for (ledger_recovering)", file=sys.stderr)
        return EXIT_TIMED_OUT


async def _policy_line(where: Where, reached: Reached, db: str, known: Remembered) -> str:
    """Which policy will count, or why none can: as the coordinator of this host will decide it."""
    from coordinator.policy import PolicyRefused, decode_policy, load_policy
    from coordinator.publishing import read_standing
    from pooler.cli.options import settings_of

    standing = await read_standing(reached.store, reached.keys.db(db))
    generation, stored = known.policy(db) or (0, b"")
    granting = standing.alias.granting
    text = next((each.policy for each in reached.specs_of(db) if each.policy), None)
    if granting and granting >= generation:
        generation, stored, whence = granting, standing.generations.get(granting, b""), "that etcd has"
    elif generation:
        whence = "that was in force when this host last saw the ledger whole"
    elif text is None:
        return "no policy is known, and the config names none: nothing is granted until one is published"
    else:
        files = (each.policy for each in settings_of(where.config).databases.values() if each.ledger == db)
        whence = f"of {next(files).path}: no other is known here"
    try:
        if not generation and text is not None:
            policy, _ = load_policy(text)
        else:
            policy = decode_policy(stored)
    except PolicyRefused as refused:
        return f"no policy can count (policy_refused), and nothing is granted until one does: {refused}"
    return (f"policy generation {policy.generation} ({policy.server_session_permits} permits) will count, "
            f"the one {whence}")


async def _until_active(reached: Reached, db: str, head: LedgerHead) -> int:
    import trio

    from coordinator.ledger.record import LedgerState
    from coordinator.store.api import StoreUnavailable, StoreUnknown

    ledger, said = reached.ledger(db), ""
    while True:
        try:
            snapshot = await ledger.snapshot()
        except (StoreUnavailable, StoreUnknown):
            snapshot = None
        if snapshot is not None and (snapshot.head is None or snapshot.head.rebuilt < head.rebuilt):
            print(f"pooler: {db}: the ledger is lost again: etcd was wiped or restored while it was being "
                  "rebuilt. Give the order again", file=sys.stderr)
            return 1
        if snapshot is not None and snapshot.head is not None:
            line = progress_text(snapshot, db)
            if snapshot.head.incarnation != head.incarnation:
                print(f"pooler: {db}: another rebuild took the place of this one", file=sys.stderr)
                return 1
            if line != said:
                print(f"{db}: {line}", flush=True)
            said = line
            if snapshot.head.state is LedgerState.ACTIVE:
                return 0
        await trio.sleep(POLL_SECONDS)  # noqa: TID251 - the pace of what is told


def progress_text(snapshot: LedgerSnapshot, db: str) -> str:
    """How far it is, in one line."""
    from coordinator.ledger.record import LedgerState
    from coordinator.ledger.recovery import not_heard
    from coordinator.ledger.states import SessionState

    assert snapshot.head is not None
    unknown = sum(held.session.state is SessionState.UNKNOWN for held in snapshot.sessions)
    line = f"{snapshot.head.state}: {len(snapshot.sessions) - unknown} sessions held, {unknown} unknown"
    if snapshot.active_limits is None:
        line += "; waits for a policy: where the coordinator's log says policy_refused, it says why"
    unheard = not_heard(snapshot, db) if snapshot.head.state is LedgerState.RECOVERING else []
    return line + (f"; waits for workers {', '.join(unheard)}" if unheard else "")
