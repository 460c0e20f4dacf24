"""The admin reserve of a server without a slot to spare: taken all the time, but for one fresh login at each
sample, which must come in whatever the fleet does."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from pooler.demo.client import RawClient, ServerSaid
from pooler.demo.judge import Verdict
from pooler.demo.postgres import Server
from pooler.demo.process import has_ended
from pooler.demo.serverlog import TOO_MANY_CONNECTIONS

SAMPLE_SECONDS = 0.1
PROBE = "chaos_admin"  # an ordinary role: no slot is kept for it but those the budget leaves
RECOVERS = "server recovers"
RECOVERY_SAMPLES_MAX = 50  # for each crash
_LOGIN_SECONDS = 10.0
_SESSIONS = "SELECT pid FROM pg_stat_activity WHERE usename = '{}'"
_RECOVERING = ("57P03", "57P01", "57P02")


class AdminReserve:
    """`count` admin sessions at a server: one of them new at each sample, the others kept.

    `sessions` are the pids of the fleet's own sessions as last seen, `most` the most at one sample.
    """

    def __init__(self, server: Server, count: int, dbname: str, of_user: str) -> None:
        self._server, self._count, self._dbname = server, count, dbname
        self._statement = _SESSIONS.format(of_user)
        self._kept: list[RawClient] = []
        self._over = threading.Event()
        self._lock = threading.Lock()  # held while slots are used
        self.sessions: list[int] = []
        self.most = 0
        self.outcomes: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._sample, name="admin reserve", daemon=True)

    def start(self) -> None:
        """Take the slots, begin to sample."""
        self._thread.start()

    def leave(self) -> None:
        """The end: no session is left when this returns."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    @contextmanager
    def away(self) -> Iterator[None]:
        """No session and no sample meanwhile: a command has the reserve."""
        with self._lock:
            self._forget_kept()
            yield

    def verdict(self, recoveries: int = 0) -> Verdict:
        """Each sample's login came in, unless the server was starting up, which it was so often."""
        counts = self.outcomes
        refused = sum(count for word, count in counts.items() if word not in ("in", RECOVERS))
        too_long = counts[RECOVERS] > recoveries * RECOVERY_SAMPLES_MAX
        text = (f"{sum(counts.values())} samples, each a fresh login into the reserve: "
                + ", ".join(f"{word} {count}" for word, count in sorted(counts.items()))
                + f"; most sessions of the fleet at a sample {self.most}")
        return Verdict("admin", counts["in"] > counts.total() / 2 and not refused and not too_long, text)

    def _sample(self) -> None:
        while not self._over.wait(SAMPLE_SECONDS):
            with self._lock:
                word = self._login()
            self.outcomes[word] += 1
        with self._lock:
            self._forget_kept()

    def _login(self) -> str:
        """One word for how a sample went."""
        try:
            self._keep()
            fresh = self._client()
            try:
                rows = fresh.query(self._statement)
            finally:
                _close(fresh)
        except ServerSaid as said:
            if said.sqlstate in _RECOVERING:
                return RECOVERS
            return "NO SLOT" if said.sqlstate == TOO_MANY_CONNECTIONS else said.sqlstate
        except (OSError, EOFError):
            return RECOVERS  # a crash of one backend ends every session
        self.sessions = [int(row[0] or 0) for row in rows]
        self.most = max(self.most, len(rows))
        return "in"

    def _keep(self) -> None:
        """All but one slot of the reserve. Raises as a login does."""
        for each in list(self._kept):
            try:
                each.query("SELECT 1")
            except (OSError, EOFError, ServerSaid):
                each.close()
                self._kept.remove(each)
        while len(self._kept) < self._count - 1:
            self._kept.append(self._client())

    def _client(self) -> RawClient:
        client = RawClient(str(self._server.directory), self._server.port, _LOGIN_SECONDS)
        try:
            return client.login(PROBE, dbname=self._dbname)
        except BaseException:
            client.close()
            raise

    def _forget_kept(self) -> None:
        for each in self._kept:
            _close(each)
        self._kept = []


def _close(client: RawClient) -> None:
    """End a session; its backend has given its slot up when this returns."""
    try:
        backend = os.pidfd_open(client.session.pid)
    except ProcessLookupError:
        client.close()
        return
    client.close()
    has_ended(backend, 5)
    with suppress(OSError):
        os.close(backend)
