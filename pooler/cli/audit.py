"""`pooler ledger audit` and `explain`: the ledger held beside the real servers, and one permit's way out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

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
    from coordinator.audit import Audit, Pool
    from pooler.cli.reach import Where


ATTESTED_SHOWN_MAX = 10  # the latest; all with --json


def audit(
    db: DbArgument,
    monitor: Annotated[str | None, typer.Option(
        "--monitor", metavar="DSN",
        help="With --etcd: user, password, dbname and TLS of the looks (the hosts are the ledger's). A "
             "password is better given as PGPASSWORD.")] = None,
    config: ConfigOption = None,
    etcd: EtcdOption = None,
    fleet: FleetOption = None,
    prefix: PrefixOption = "pooler",
    as_json: JsonOption = False,
) -> None:
    """Compare the ledger with the real server: sessions without permit, permits without session, the budget.

    Sessions in SESSION_UNKNOWN are listed apart, with what they wait for, and so is what operators forced in
    this ledger. The look takes an admin permit, and gives it back. With --etcd the roles whose sessions are
    the fleet's are those that hold a permit now; without --monitor only what etcd holds is judged.

    Exits 0 when both agree, 1 on any difference, when a host could not be audited, or when no admin permit is
    free (it says who holds them).

    Example: pooler ledger audit orders --json
    """
    import trio

    from pooler.cli.out import print_json
    from pooler.cli.reach import Where

    where = Where(config, etcd, fleet, prefix, monitor)
    found = trio.run(_audit, where, db)
    if as_json:
        print_json(found.as_dict())
    else:
        _tell(found)
    raise typer.Exit(found.exit_code)


async def _audit(where: Where, name: str) -> Audit:
    from coordinator.audit import audit as compare
    from coordinator.ledger.attestation import attestations_of
    from pooler.cli.reach import now_us, reach
    from pooler.errors import UsageFault

    async with reach(where) as reached:
        db = reached.db(name)
        ledger = await reached.whole_ledger(db)
        hosts = list(dict.fromkeys(host for each in reached.specs_of(db) for host in each.hosts))
        async with reached.eyes(db) as eyes:
            if eyes is None and where.etcd is None:
                raise UsageFault(f"an audit must look at the servers: set `monitor` for a database of {db}")
            kept = (await reached.store.range(reached.keys.operators())).entries
            return await compare(
                ledger, eyes, db=db, hosts=hosts, pools=_pools(where, db) if where.etcd is None else (),
                lease_ttl_seconds=reached.spec.lease_ttl_seconds, now_us=now_us,
                attested=attestations_of(kept, db))


def _pools(where: Where, db: str) -> list[Pool]:
    """Whose sessions at the server must have a permit: all users of the userlist, or the forced one."""
    from coordinator.audit import Pool
    from pooler.cli.options import settings_of
    from pooler.net.userlist import parse_userlist

    settings = settings_of(where.config)
    file = settings.auth.file
    users = parse_userlist(file.read_bytes(), str(file)).users if file is not None else {}
    consoles = {*settings.admin.users, *settings.admin.stats_users}
    found = []
    for name, database in settings.databases.items():
        if database.ledger == db:
            names = {database.user} if database.user is not None else set(users) - consoles
            found += [Pool(database.dbname or name, user) for user in sorted(names)]
    return found


def _tell(found: Audit) -> None:
    from coordinator.awaiting import clock_time
    from pooler.cli.out import duration

    print(f"{found.db}: {found.held} of {found.slots} slots held, reserve {found.reserve_held}/"
          f"{found.reserve_slots}, admin {found.admin_held}/{found.admin_slots} (this audit's included), "
          f"at revision {found.revision}")
    for node, count in found.ours.items():
        print(f"{node}: {count} sessions of ours")
    for node, count in found.elsewhere.items():
        if count:
            print(f"{node}: {count} sessions of other ledgers of this fleet")
    if found.foreign:
        others = ", ".join(f"{role} {count}" for role, count in sorted(found.foreign.items()))
        print(f"other clients: {others}")
    for each in found.attested[-ATTESTED_SHOWN_MAX:]:
        print(f"by an operator, {clock_time(each.at_us)}: {each.who}: {each.what}"
              + (f": {each.evidence}" if each.evidence else "")
              + (f" ({each.outcome})" if each.outcome else ""))
    for line in found.strange:
        print(f"unreadable: {line}")
    for row in found.unknown:
        age = duration(row["age_seconds"])
        print(f"unknown: {row['permit']} for {age}, waits for {row['awaited_proof']}")
    for node, why in found.not_audited.items():
        print(f"not audited: {node}: {why}")
    for wrong in found.differences:
        print(f"difference: {wrong.invariant} {wrong.what}: {wrong.detail}")
    print("clean" if not found.exit_code else f"{len(found.differences)} differences")


def explain(
    db: DbArgument,
    permit: Annotated[str, typer.Argument(metavar="PERMIT", help="kind/slot.generation")],
    config: ConfigOption = None,
    etcd: EtcdOption = None,
    fleet: FleetOption = None,
    prefix: PrefixOption = "pooler",
    as_json: JsonOption = False,
) -> None:
    """Say what one permit is, which proof would free it, and who could see it.

    Exits 1 if there is no such permit (any more), 2 if PERMIT is no name of one.

    Example: pooler ledger explain orders main/17.4711
    """
    import sys

    import trio

    from pooler.cli.ledger import permit_named, read_rows
    from pooler.cli.out import print_json
    from pooler.cli.reach import Where

    wanted = str(permit_named(permit))
    name, rows, _ = trio.run(read_rows, Where(config, etcd, fleet, prefix), db)
    row = next((each for each in rows if each["permit"] == wanted), None)
    if as_json:
        print_json(row)
    elif row is None:
        print(f"pooler: {name}: no permit {wanted}: it was released, or its slot has another tenant by now",
              file=sys.stderr)
    else:
        print("\n".join(explanation(row)))
    raise typer.Exit(0 if row is not None else 1)


def _waiting(row: dict[str, Any]) -> list[str]:
    """Which proof is awaited, since when, who looks, and whether the server can be reached."""
    from coordinator.awaiting import clock_time

    known = f"known to have ended ({row['owner_ended']})" if row["owner_ended"] else "not known to have ended"
    lines = [f"its owner's process is {known}"]
    since = f" since {clock_time(row['waits_since_us'])}" if row["waits_since_us"] else ""
    proofs = "absent, or restarted" if row["pid"] else "never_born"
    seen_at = row["backend"]
    if not seen_at:
        return [*lines, f"waits{since} for an attestation: it names no server that could be looked at"]
    lines.append(f"waits{since} for proof {proofs} on {seen_at}: {row['awaited_proof']}")
    if row["unreachable_since_us"]:
        lines.append(f"{seen_at} is unreachable since {clock_time(row['unreachable_since_us'])}")
    if row["told_by"]:
        return [*lines, f"the leading coordinator on {row['told_by']} looks; so could any that reaches it"]
    return [*lines, f"no leader tells of it (yet): any coordinator that can look at {seen_at} could see it"]


def explanation(row: dict[str, Any]) -> list[str]:
    """A permit for people."""
    from pooler.cli.out import duration

    at = row["backend"] or "no server yet"
    lines = [
        f"{row['permit']} of {row['database']}: {row['state']} for {duration(row['age_seconds'])}",
        f"owner {row['owner']} on {row['host']}, pool {row['user']}@{row['dbname']}, epoch {row['epoch']}",
        f"server process {row['pid'] or 'not known'} at {at}",
    ]
    if row["ticket"]:
        whose = f" of {row['tenant']}" if row["tenant"] else ""
        lines.append(f"in a transaction: ticket {row['ticket']}{whose}")
    if row["state"] != "SESSION_UNKNOWN":
        return [*lines, "its owner frees it when the server has ended the session"]
    lines += _waiting(row)
    if row["abandoned"]:
        lines.append("its owner gave the attempt up")
    if row["terminating"]:
        lines.append("pg_terminate_backend was ordered for it")
    return [*lines, "or, on your word: pooler ledger resolve "
                    f"{row['database']} {row['permit']} --evidence '…'"]
