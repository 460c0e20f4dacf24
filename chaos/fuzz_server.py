"""The server's half of the fuzz: a fleet in front of a scripted server that says anything, in every phase.

Several clients share each pool of one or two sessions, so that a session goes from one to the next at once: a
byte that one of them hears of another's answer is seen by its mark.
"""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any

from chaos.fuzz_run import Run, audited, no_wrong
from chaos.fuzz_said import in_service, to_facts, to_own_query, to_startup
from chaos.fuzz_words import Hearing, Nonsense, mark, marks, may_close, read
from chaos.outcome import Outcome
from chaos.script import PASSWORD, Asked, Say, Script, Session, honest
from chaos.scripted_server import ScriptedServer
from coordinator.ledger.keys import FleetKeys
from coordinator.ledger.states import SessionState
from pooler.demo import client as c
from pooler.demo.etcd import Etcd
from pooler.demo.fleet import Fleet, FleetPlan
from pooler.demo.judge import Verdict
from pooler.demo.ledgerwatch import LedgerWatch
from pooler.demo.postgres import temporary_directory
from pooler.pool.janitor import OWN_QUERY_SECONDS_MAX
from pooler.relay.losing import REFITS_MAX

DBNAME, HONEST = "scripted", "honest"
POOLS, PER_POOL, PERMITS = 64, 2, 300
MODES = ("transaction", "transaction", "session", "statement")
ODD_LOGINS, ODD_FACTS, ODD_OWN = 0.1, 0.05, 0.15  # of those that there are, so many are inputs
QUIET_SECONDS = 0.05  # behind an odd answer that was said: what is heard by then is all
WAIT_SECONDS, QUERY_SECONDS = 20, 2  # query_wait_timeout and query_timeout
# A query may find session after session that does not answer what the pooler sets on it, or each of three
# may wait for a session in vain.
ANSWER_SECONDS_MAX = (REFITS_MAX + 1) * (WAIT_SECONDS + OWN_QUERY_SECONDS_MAX) + QUERY_SECONDS + 10.0
LOGIN_SECONDS_MAX, SETTLED_SECONDS_MAX = 60.0, 60.0
PER_LOGIN = 60
_ASKED = "fuzz "
_BEFORE = ("set work_mem = '1MB'", "set app.x = '1'", "listen ch", "reset all", "discard all",
           "set timezone = 'Asia/Tokyo'", "create temp table t()", "prepare p as select 1")


@dataclass(slots=True)
class Stage:
    """Everything that runs."""

    server: ScriptedServer
    fleet: Fleet
    watch: LedgerWatch

    @property
    def port(self) -> int:
        return self.fleet.ports.listen

    def log_in(self, user: str, **parameters: str) -> c.RawClient:
        """Raises ServerSaid, Disconnected, OSError."""
        client = c.RawClient("127.0.0.1", self.port, LOGIN_SECONDS_MAX)
        try:
            return client.login(user, PASSWORD.decode(), DBNAME, **parameters)
        except BaseException:
            client.close()
            raise


@contextmanager
def stage(server: ScriptedServer, workers: int) -> Iterator[Stage]:
    """Start it, stop it. Raises PartFailed."""
    directory = temporary_directory("fuzz")
    users = [f"u{number}" for number in range(POOLS)]
    with ExitStack() as ends:
        ends.callback(shutil.rmtree, directory, ignore_errors=True)
        ends.enter_context(server)
        (directory / "etcd").mkdir()
        etcd = Etcd(directory / "etcd")
        ends.callback(etcd.kill)
        etcd.start()
        more: dict[str, dict[str, Any]] = {
            "etcd": {"lease_ttl": "2s"}, "log": {"level": "error"}, "auth": {"type": "trust"},
            "pool": {"server_login_retry": "0s", "default_pool_size": 2, "server_connect_timeout": "2s",
                     "cancel_wait_timeout": "1s", "query_wait_timeout": f"{WAIT_SECONDS}s",
                     "client_login_timeout": "30s"},
            "users": {user: {"pool_mode": MODES[at % len(MODES)], "pool_size": 2,
                             "query_timeout": f"{QUERY_SECONDS}s"}
                      for at, user in enumerate(users)}}
        word = PASSWORD.decode()
        fleet = Fleet(FleetPlan(
            directory / "fleet", (server.address,), DBNAME, dict.fromkeys((*users, HONEST), word),
            tuple(etcd.endpoints), ("monitor", word), name="fuzz", workers=workers, permits=PERMITS,
            more=more))
        fleet.write()
        ends.callback(fleet.stop)
        fleet.start()
        watch = LedgerWatch(etcd.endpoints[0], FleetKeys("pooler", "fuzz"), fleet.plan.ledger)
        yield Stage(server, fleet, watch)


class OddServer:
    """What the scripted server answers: to a client's own texts by the number in them, else by chance."""

    def __init__(self, seed: int, place: int = 0, *, shared: bool) -> None:
        """`place`: where it serves, of several of one seed. `shared`: by several clients at a time. Then no
        query of the pooler's own is answered twice: what a client asks may stand right behind it, and the
        second answer cannot be told from the one to that; the client's own would be the next client's.
        """
        self._seed, self._shared = seed, shared
        self._chance = Random(f"{seed}:server:{place}")
        self.said: Counter[str] = Counter()  # inputs by phase
        self.told: set[int] = set()  # numbers that were said lately

    def script_for(self, session: Session) -> Script:
        if not session.user.startswith("u"):
            return Script()
        return Script([("any", self._answer)], self._chance.choice(("trust", "trust", "md5", "scram")))

    def _answer(self, session: Session, asked: Asked) -> Say | None:
        match asked.event:
            case "startup" | "password":
                chance = self._input("login", ODD_LOGINS)
                return None if chance is None else to_startup(chance, session)
            case "facts":
                chance = self._input("facts", ODD_FACTS)
                return None if chance is None else to_facts(chance, session)
            case "ssl" | "gss" | "cancel" | "look" | "X":
                return None
        number = _number_in(asked.text or session.text)
        if asked.event == "Q" and number is None:
            chance = self._input("own", ODD_OWN)
            return None if chance is None else to_own_query(
                chance, honest(session, asked).data, once=self._shared)
        if number is None or asked.event not in ("Q", "FPBDES"[1 + number % 5], "F"):
            return None
        self.said["service"] += 1
        self.told.add(number)
        return in_service(self._seed, number, honest(session, asked).data)

    def _input(self, phase: str, part: float) -> Random | None:
        if self._chance.random() >= part:
            return None
        self.said[phase] += 1
        return Random(f"{self._seed}:{phase}:{self._chance.random()}")


def _number_in(text: str) -> int | None:
    return next(iter(marks(text.encode())), None) if text.startswith(_ASKED) else None


def asking(seed: int, number: int) -> tuple[bytes, int]:
    """What a client sends to have input `number` said, and how many ReadyForQuery should come."""
    chance = Random(f"{seed}:ask:{number}")
    text = _ASKED + mark(number)
    name = chance.choice(("", "a", f"n{number % 50}"))
    group = c.parse(text, name) + c.bind((), name) + c.describe() + c.execute() + c.SYNC
    match chance.randrange(14):
        case 0 | 1 | 2 | 3:
            return c.query(text), 1
        case 4 | 5 | 6:
            return (c.close("S", name) + group if name else group), 1
        case 7:
            return c.query("begin") + c.query(text) + c.query("commit"), 3
        case 8:
            return c.query(text) * 2, 2
        case 9:
            return c.query(chance.choice(_BEFORE)) + c.query(text), 2
        case 10:
            return c.query(text) + c.message(b"d", b"1\n") + c.message(b"c") + c.SYNC, 2
        case 11:
            return c.parse(text) + c.describe("S") + c.FLUSH + c.bind() + c.execute() + c.SYNC, 1
        case 12:
            return c.parse(text) + c.bind() + c.execute() + c.SYNC + c.query(text), 2
    return group * 2, 2


class Asker:
    """A client that has odd answers said to it, one after the other."""

    def __init__(self, here: Stage, odd: OddServer, seed: int, user: str) -> None:
        self._here, self._odd, self._seed, self._user = here, odd, seed, user
        self._client: c.RawClient | None = None
        self._hearing = Hearing()
        self._left = 0
        self.heard: Counter[str] = Counter()
        self.wrong: list[str] = []

    def ask(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            if self._client is None:
                self._log_in()
            if self._client is None:
                continue
            try:
                said = self._ask(self._client, number)
            except Nonsense as heard:
                self.wrong.append(f"{number}: {heard}")
                said = "nonsense"
            strange = self._hearing.strange - {0}
            if strange:
                self.wrong.append(f"{number} of {self._user}: heard what others were said: {sorted(strange)}")
            self.heard[said] += 1
            self._odd.told.discard(number)
            self._left -= 1
            if said != "answered" or strange or self._left <= 0:
                self._leave(in_order=number % 2 == 0)
        self._leave(in_order=True)

    def _log_in(self) -> None:
        began = time.monotonic()
        while self._client is None and time.monotonic() - began < LOGIN_SECONDS_MAX:
            try:
                self._client = self._here.log_in(self._user)
            except c.ServerSaid as said:
                self.heard[f"login {said.sqlstate}"] += 1
            except (OSError, EOFError) as ended:
                self.wrong.append(f"{self._user}: a login ended with {ended!r}")
        if self._client is None:
            self.wrong.append(f"{self._user}: no login within {LOGIN_SECONDS_MAX:g} s")
        self._hearing, self._left = Hearing(), PER_LOGIN

    def _leave(self, *, in_order: bool) -> None:
        if self._client is not None:
            (self._client.close if in_order else self._client.abort)()
            self._client = None

    def _ask(self, client: c.RawClient, number: int) -> str:
        hearing = self._hearing
        hearing.asked.add(number)
        data, readies = asking(self._seed, number)
        wanted = hearing.readies + readies
        try:
            client.socket.settimeout(LOGIN_SECONDS_MAX)
            client.socket.sendall(data)
        except OSError:
            pass  # what it was told stands there to be read
        until = time.monotonic() + ANSWER_SECONDS_MAX
        while hearing.readies < wanted:
            was_told = number in self._odd.told
            said = read(client.socket, hearing, QUIET_SECONDS)
            if said == "closed":
                if not may_close(hearing, was_cut=True):
                    self.wrong.append(f"{[*hearing.asked]} of {self._user}: closed without a word")
                return f"closed {hearing.code}"
            if said == "nothing" and was_told:
                return "nothing more"
            if said == "nothing" and time.monotonic() > until:
                self.wrong.append(f"{[*hearing.asked]} of {self._user}: the last never said nor answered, "
                                  f"behind {b''.join(hearing.heard)!r}")
                return "nothing"
        return "answered"


def fuzz_server(seed: int, inputs: int, say: Callable[[str], None]) -> Outcome:
    """Have `inputs` odd answers said, and those of logins beside them. Raises PartFailed."""
    odd = OddServer(seed, shared=True)
    server = ScriptedServer(odd.script_for)
    with stage(server, workers=2) as here:
        run = Run(here.fleet, lambda: here.log_in(HONEST))
        askers: list[Asker] = []

        def ask(numbers: Sequence[int]) -> None:
            asker = Asker(here, odd, seed, f"u{len(askers) % POOLS}")
            askers.append(asker)
            asker.ask(numbers)

        run.all(inputs, POOLS * PER_POOL, ask)
        heard = sum((each.heard for each in askers), Counter[str]())
        wrong = [each for asker in askers for each in asker.wrong]
        total = sum(odd.said.values())
        say(f"server: {total} inputs {dict(odd.said)} in {server.born} sessions; "
            f"heard: {dict(heard.most_common(9))}")
        verdicts = [*run.verdicts("server"), no_wrong("server", wrong), returned(here), audited(here.fleet)]
        return Outcome(verdicts, {"server": {
            "inputs": total, "said": dict(odd.said), "sessions": server.born, "heard": dict(heard),
            **run.figures}})


def returned(here: Stage) -> Verdict:
    """What the ledger holds is what is open at the server: every other permit has been given back."""
    deadline = time.monotonic() + SETTLED_SECONDS_MAX
    while True:
        held = Counter(each.state for each in here.watch.now().values())
        alive = sum(here.server.alive(user) for user in (HONEST, *(f"u{n}" for n in range(POOLS))))
        if held.total() == held[SessionState.OPEN] == alive or time.monotonic() > deadline:
            break
        here.fleet.child.wait_until(_after(0.2), "the fleet lives")  # type: ignore[union-attr]
    states = {str(state): count for state, count in held.items()}
    return Verdict("permits", held.total() == held[SessionState.OPEN] == alive,
                   f"{alive} sessions are open, and permits held: {states}")


def _after(seconds: float) -> Callable[[], bool]:
    moment = time.monotonic() + seconds
    return lambda: time.monotonic() >= moment
