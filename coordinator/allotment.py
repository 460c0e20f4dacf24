"""How many tickets of a class each worker is to execute: weighted shares of the fleet, and the moves there.

Pure. A tenant's share of a class goes by its weight, wherever its clients are, and is split evenly over its
workers; nobody gets more than it needs while another needs it, each that needs any has one where permits
allow. What nobody needs stays where it is: only need moves permits, and who gets some gets its part of what
is spare with them, so that a load that grows does not ask for each. Where there are fewer permits than
workers that need one, they go in turns.

A class whose own permits do not suffice borrows from those that need theirs less, up to what each lends at
most (`maxLend`, however idle the lender is: the owner of a policy says how far it goes).
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction

from coordinator.ledger.execution import NOT_RECALLED, Gift, Seat, Shares
from coordinator.policy import Policy

Needs = Mapping[str, Mapping[str, int]]  # by worker, by tenant: tickets that wait or execute


@dataclass(frozen=True, slots=True)
class Terms:
    """What a policy says of a tenant; `inflight` None: as many as its class has permits."""

    weight: int = 1
    inflight: int | None = None


ANY_TENANT = Terms()


# ---- who is to have how much


def exact_shares(needs: Needs, tenants: Mapping[str, Terms], permits: int) -> dict[str, Fraction]:
    """By worker, before it is made whole: weighted max-min over tenants, each even over its workers, with
    one for each that needs any. For at least as many permits as such workers."""
    return {worker: _sum(parts) for worker, parts in _exact_parts(needs, tenants, permits).items()}


def _exact_parts(needs: Needs, tenants: Mapping[str, Terms], permits: int) -> dict[str, dict[str, Fraction]]:
    """The same by worker and tenant; of a worker that has one for it needs any, in the name of nobody."""
    least: set[str] = set()
    while True:
        rest = {worker: wanted for worker, wanted in needs.items() if worker not in least}
        parts = _by_tenant(rest, tenants, permits - len(least))
        below = {worker for worker, each in parts.items() if _sum(each) < 1}
        if not below:
            return parts | {worker: {"": Fraction(1)} for worker in least}
        least |= below


def _sum(parts: Mapping[str, Fraction]) -> Fraction:
    return sum(parts.values(), Fraction(0))


def _by_tenant(
    needs: Needs, tenants: Mapping[str, Terms], permits: int
) -> dict[str, dict[str, Fraction]]:
    wanted: dict[str, dict[str, int]] = {}
    for worker, by_tenant in needs.items():
        for tenant, tickets in by_tenant.items():
            if tickets > 0:
                wanted.setdefault(tenant, {})[worker] = tickets
    terms = {tenant: tenants.get(tenant, ANY_TENANT) for tenant in wanted}
    caps = {tenant: sum(each.values()) if (most := terms[tenant].inflight) is None
            else min(most, sum(each.values())) for tenant, each in wanted.items()}
    found: dict[str, dict[str, Fraction]] = {
        worker: {} for worker, each in needs.items() if any(each.values())}
    for tenant, share in _fill(caps, {name: each.weight for name, each in terms.items()},
                               Fraction(permits)).items():
        for worker, part in _fill(wanted[tenant], dict.fromkeys(wanted[tenant], 1), share).items():
            found[worker][tenant] = part
    return found


def _fill(caps: Mapping[str, int], weights: Mapping[str, int], total: Fraction) -> dict[str, Fraction]:
    """`total` by weight, to none above its cap; what one cannot take goes to the others."""
    left, weight_left = total, sum(weights[each] for each in caps)
    found = {}
    for each in sorted(caps, key=lambda name: (Fraction(caps[name], weights[name]), name)):
        found[each] = min(Fraction(caps[each]), left * weights[each] / weight_left)
        left -= found[each]
        weight_left -= weights[each]
    return found


def whole_shares(
    needs: Needs, tenants: Mapping[str, Terms], permits: int, now: Mapping[str, int], turn: int = 0
) -> dict[str, int]:
    """By worker that needs any, within one of `exact_shares`: rather as many as it has `now`.

    With fewer permits than such workers one each to as many, beginning at the one whose `turn` it is.
    """
    active = sorted(worker for worker, each in needs.items() if any(count > 0 for count in each.values()))
    if len(active) > permits:
        chosen = {(turn + each) % len(active) for each in range(max(permits, 0))}
        return {worker: int(number in chosen) for number, worker in enumerate(active)}
    parts = _exact_parts({worker: needs[worker] for worker in active}, tenants, permits)
    exact = {worker: _sum(each) for worker, each in parts.items()}
    found = {worker: int(share) for worker, share in exact.items()}
    _round_up(found, exact, parts, now)
    return found


def _round_up(
    found: dict[str, int], exact: Mapping[str, Fraction], parts: Mapping[str, Mapping[str, Fraction]],
    now: Mapping[str, int],
) -> None:
    """Give out what the workers in `found` lost by being made whole, one to each at most: first where tenants
    lost most of a permit over all their workers, so that each tenant has what is its own, too."""
    left = int(sum(exact.values())) - sum(found.values())
    lost: dict[str, Fraction] = {}
    for worker, each in parts.items():
        for tenant, part in each.items():
            lost[tenant] = lost.get(tenant, Fraction(0)) + part * (1 - found[worker] / exact[worker])
    candidates = [worker for worker in exact if exact[worker] != found[worker]]
    candidates.sort(key=lambda worker: (
        now.get(worker, 0) <= found[worker], found[worker] - exact[worker], worker))
    for least in (Fraction(1, 2), Fraction(-left - 1)):  # then in order: nobody has lost less than that
        for worker in list(candidates) if left else ():
            each = parts[worker]
            if left and sum(lost[name] * part for name, part in each.items()) >= least * exact[worker]:
                found[worker] += 1
                left -= 1
                candidates.remove(worker)
                for tenant, part in each.items():
                    lost[tenant] -= part / exact[worker]


def settle(
    needed: Mapping[str, int], now: Mapping[str, int], permits: int
) -> dict[str, int]:
    """What each worker is to have, of all that there are: what it needs, and what is spare stays where it is
    unless somebody must be raised, or has none. `needed` sums up to `permits` at most."""
    workers = sorted(needed)
    if not workers:
        return {}
    part = (permits - sum(needed.values())) // len(workers)
    least = {each: needed[each] + part for each in workers}
    found = {each: least[each] if needed[each] > (has := now.get(each, 0)) or not has else has
             for each in workers}
    over = sum(found.values()) - permits
    for each in sorted(workers, key=lambda name: (least[name] - found[name], name)):
        if over <= 0:
            break
        cut = min(over, max(0, found[each] - least[each]))
        found[each] -= cut
        over -= cut
    spare = [(found[each] - needed[each], each) for each in workers]
    heapq.heapify(spare)
    for _ in range(-over):
        surplus, each = heapq.heappop(spare)
        found[each] += 1
        heapq.heappush(spare, (surplus + 1, each))
    return found


# ---- lending


@dataclass(frozen=True, slots=True)
class Class:
    """One class as it stands: its permits that can be used, what it lends at most, what its workers need."""

    permits: int
    max_lend: int
    needs: Needs = field(default_factory=dict)

    def wants(self, tenants: Mapping[str, Terms]) -> int:
        """Tickets that could execute now."""
        by_tenant: dict[str, int] = {}
        for each in self.needs.values():
            for tenant, tickets in each.items():
                by_tenant[tenant] = by_tenant.get(tenant, 0) + tickets
        return sum(tickets if (most := tenants.get(tenant, ANY_TENANT).inflight) is None
                   else min(most, tickets) for tenant, tickets in by_tenant.items())


def loans(
    classes: Mapping[str, Class], tenants: Mapping[str, Terms], out: Mapping[tuple[str, str], int],
) -> dict[tuple[str, str], int]:
    """By (lender, borrower): what is to be lent. What is `out` stays first, for as long as it is needed and
    the lender has it to spare: that one is served first."""
    wants = {name: each.wants(tenants) for name, each in classes.items()}
    lends = {name: max(0, min(each.max_lend, each.permits - wants[name])) for name, each in classes.items()}
    lacks = {name: max(0, wants[name] - each.permits) for name, each in classes.items()}
    found: dict[tuple[str, str], int] = {}

    def lend(lender: str, borrower: str, most: int) -> None:
        part = min(most, lends.get(lender, 0), lacks.get(borrower, 0))
        if part > 0 and lender != borrower:
            found[lender, borrower] = found.get((lender, borrower), 0) + part
            lends[lender] -= part
            lacks[borrower] -= part

    for (lender, borrower), count in sorted(out.items()):
        lend(lender, borrower, count)
    for borrower in sorted(classes):
        for lender in sorted(classes, key=lambda name: (-lends[name], name)):
            lend(lender, borrower, lacks[borrower])
    return found


# ---- the moves


@dataclass(frozen=True, slots=True)
class Moves:
    """What is to be written now. `given`: by class that gives; `keep`: who is to give back what it has above
    that. Both are empty where all is as it should be."""

    given: Mapping[str, Mapping[Seat, Gift]] = field(default_factory=dict)
    keep: Mapping[Seat, int] = field(default_factory=dict)
    crowded: bool = False  # somewhere there are more workers than permits: turns are to be taken


def terms_of(policy: Policy) -> dict[str, Terms]:
    """Of each tenant that the policy names."""
    return {name: Terms(each.weight, each.inflight) for name, each in policy.tenants.items()}


def usable_permits(policy: Policy, unusable: int) -> dict[str, int]:
    """By class: its permits, less its part of slots that no session can be in while they are unknown, where
    the classes have as many permits together as there are slots."""
    sizes = {name: each.permits for name, each in policy.classes.items()}
    total = sum(sizes.values())
    missing = min(total, max(0, total - (policy.server_session_permits - unusable)))
    cut = {name: missing * size // total for name, size in sizes.items()}
    rest = missing - sum(cut.values())
    for name in sorted(sizes, key=lambda each: (-(missing * sizes[each] % total), each))[:rest]:
        cut[name] += 1
    return {name: size - cut[name] for name, size in sizes.items()}


def moves(
    policy: Policy, shares: Shares, demand: Mapping[str, Needs], *, live: frozenset[str], unusable: int = 0,
    turn: int = 0,
) -> Moves:
    """What the leader is to write. `demand`: by class; `live`: workers that are there and may have permits.

    What a worker that is gone still has counts as given, and is asked back by nobody.
    """
    return _Pass(policy, shares, live, usable_permits(policy, unusable)).over(demand, turn)


class _Pass:
    """One pass over all classes of a ledger: what is not out goes down as it is given."""

    def __init__(
        self, policy: Policy, shares: Shares, live: frozenset[str], usable: Mapping[str, int]
    ) -> None:
        self._policy = policy
        self._shares = shares
        self._live = sorted(live)
        self._usable = usable
        self._room = {name: usable[name] - shares.given(name) for name in usable}
        self._may_lend = {name: each.max_lend - shares.lent(name) for name, each in policy.classes.items()}
        self._out: dict[tuple[str, str], int] = {}  # by lender and borrower
        gone: dict[str, int] = {}
        for seat, each in shares.held.items():
            for giver, count in ((seat.execution_class, each.share.own), *each.share.borrowed.items()):
                if seat.boot_id not in live:
                    gone[giver] = gone.get(giver, 0) + count
                elif giver != seat.execution_class:
                    loan = giver, seat.execution_class
                    self._out[loan] = self._out.get(loan, 0) + count
        self._gone = gone
        self._given: dict[str, dict[Seat, Gift]] = {}

    def over(self, demand: Mapping[str, Needs], turn: int) -> Moves:
        tenants = terms_of(self._policy)
        classes = {
            name: Class(max(0, self._usable[name] - self._gone.get(name, 0)), each.max_lend,
                        {worker: demand[name][worker] for worker in self._live
                         if worker in demand.get(name, {})})
            for name, each in self._policy.classes.items()}
        lent = loans(classes, tenants, self._out)
        keep: dict[Seat, int] = {}
        crowded = False
        for name, each in classes.items():
            borrows = {lender: count for (lender, borrower), count in lent.items() if borrower == name}
            lends = sum(count for (lender, _), count in lent.items() if lender == name)
            permits = max(0, each.permits - lends + sum(borrows.values()))
            crowded = crowded or sum(any(needs.values()) for needs in each.needs.values()) > permits
            now = {worker: self._shares.of(Seat(name, worker)).permits for worker in self._live}
            needed = dict.fromkeys(now, 0) | whole_shares(each.needs, tenants, permits, now, turn)
            target = settle(needed, now, permits)
            self._repay(name, borrows)
            self._give(name, target, now, borrows)
            keep |= self._recalled(name, target)
        keep |= {seat: 0 for seat, each in self._shares.held.items()
                 if seat.execution_class not in classes and seat.boot_id in self._live
                 and each.share.keep != 0}  # the policy has no such class any more
        for given in self._given.values():
            keep = {seat: kept for seat, kept in keep.items() if seat not in given}
        return Moves(self._given, keep, crowded)

    def _repay(self, name: str, borrows: Mapping[str, int]) -> None:
        """A loan that is to end goes back at once for permits of its own class that are not out."""
        for worker in self._live:
            seat = Seat(name, worker)
            for lender, count in self._shares.of(seat).borrowed.items():
                excess = self._out.get((lender, name), 0) - borrows.get(lender, 0)
                part = min(count, excess, self._room[name])
                if part > 0 and seat not in self._given.get(name, {}):
                    self._given.setdefault(name, {})[seat] = Gift(part, instead_of=lender)
                    self._room[name] -= part
                    self._out[lender, name] -= part

    def _give(
        self, name: str, target: Mapping[str, int], now: Mapping[str, int], borrows: Mapping[str, int]
    ) -> None:
        """From what is not out, of its own class before lent; to those first that have least."""
        for worker in sorted(target, key=lambda each: (now[each], each)):
            lacks, seat = target[worker] - now[worker], Seat(name, worker)
            for giver in (name, *borrows):
                most = self._room[giver]
                if giver != name:
                    most = min(most, self._may_lend[giver])
                part = min(lacks, most)
                if part > 0 and seat not in self._given.get(giver, {}):
                    self._given.setdefault(giver, {})[seat] = Gift(part)
                    self._room[giver] -= part
                    self._may_lend[giver] -= part if giver != name else 0
                    lacks -= part

    def _recalled(self, name: str, target: Mapping[str, int]) -> dict[Seat, int]:
        keep = {}
        for worker, goal in target.items():
            seat = Seat(name, worker)
            share = self._shares.of(seat)
            wanted = goal if share.permits > goal else NOT_RECALLED
            if seat in self._shares.held and share.keep != wanted:
                keep[seat] = wanted
        return keep
