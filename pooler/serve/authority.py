"""Who may come in to this worker, and by which proof: the gate's rules from the configuration and its files.

Secrets that no file has are asked of the server through a session of a pool, under a permit as any other.
What goes wrong there is logged; a client that has proved nothing yet is told only that users cannot be
looked up.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from importlib import import_module
from time import monotonic

import structlog
import trio

from pooler.console.as_pgbouncer import PROTOCOL_VIOLATION
from pooler.console.pgbouncer_state import CONSOLE
from pooler.errors import LoginRefused, NotServing, PoolerError, UsageFault
from pooler.net.auth_files import AuthFiles
from pooler.net.auth_query import (
    DEFAULT_QUERY,
    NO_PASSWORD_FITS,
    SESSION_SETTINGS,
    AskedSecrets,
    Place,
    read_answer,
)
from pooler.net.failures import FailedLogins
from pooler.net.gate import GateRules
from pooler.net.userlist import Userlist
from pooler.observe.events import Event
from pooler.serve.registry import Registry
from pooler.settings import Settings
from pooler.wire.auth import AuthType, Method, Secret, ServerSecret
from pooler.wire.messages import is_utf8, text
from pooler.wire.scram import Verifier

PAM_SERVICE = "pgbouncer"
ANSWER_ROWS_MAX = 2  # one more than may be
ASKED_WITHOUT_NAME = "postgres"  # where a client's database is only what it says
RESERVED = frozenset({CONSOLE})

log = structlog.get_logger()


class Authority:
    """The rules of one worker; `mock_key`: see GateRules. Raises UsageFault for a faulty file."""

    def __init__(self, registry: Registry, mock_key: bytes) -> None:
        self._registry = registry
        self._mock_key = mock_key
        self._derived: dict[str, tuple[Secret, Verifier]] = {}
        self.files = AuthFiles.read(registry.settings.auth)
        self.problems: list[str] = []
        self._asked = AskedSecrets(self._ask, registry.parts.nursery.start_soon, monotonic)
        self._failures = FailedLogins(0, 0.0)
        self._methods: Counter[Method] = Counter()  # of the secrets that the server gave
        registry.listed_secret = self._secret_of
        self._apply()

    def take(self, settings: Settings) -> None:
        """A new configuration, which the registry has already. With a fault in one of its files, those of
        before stay, and `problems` says so."""
        try:
            self.files = AuthFiles.read(settings.auth)
            self.problems = []
            self._tell_pools()
        except UsageFault as fault:
            self.problems = [f"{line} (the files of before stay)" for line in str(fault).splitlines()]
        self._apply()

    def _tell_pools(self) -> None:
        """Secrets in the file that changed: sessions opened from now on log in with them."""
        registry, users = self._registry, self.files.userlist or Userlist()
        for key in list(registry.pools):
            if registry.settings.database_for(key.name, None) is None:
                continue
            forced = registry.settings.database(key.name).user if key.forces_user else None
            secret = ServerSecret.of(users.find(forced or key.user))
            if secret != ServerSecret():
                registry.pool(key.name, key.user, key.service, secret, forces_user=key.forces_user)

    def _apply(self) -> None:
        settings = self._registry.settings
        auth = settings.auth
        self._registry.known_users = () if self.files.userlist is None else self.files.userlist.users.keys()
        self._asked.keep_seconds = auth.query_cache_seconds
        self._asked.forget()
        self._derived.clear()
        self._failures.set_limits(
            auth.failed_logins_free, auth.failed_login_delay_max_seconds, settings.fleet.proxy_protocol_from)

    def rules(self, service: str | None, owner_databases: frozenset[str] = frozenset()) -> GateRules:
        """What is asked of a client that comes in by this service's port (None: by the shared one)."""
        auth, files = self._registry.settings.auth, self.files
        return GateRules(
            auth_type=AuthType(auth.type),
            find_user=partial(self._find_user, service),
            ask_again=partial(self._ask_again, service),
            mock_key=self._mock_key,
            unknown_method=self._usual_method(),
            scram_iterations=auth.scram_iterations,
            derived=self._derived,
            hba=files.hba, ident=files.ident, ident_map=auth.map,
            failures=self._failures,
            check_pam=check_pam,
            owner_databases=owner_databases,
        )

    def _usual_method(self) -> Method:
        """What most users are asked for: those who do not exist are asked the same."""
        if self._methods:
            return self._methods.most_common(1)[0][0]
        return Method.SCRAM if self.files.userlist is None else self.files.userlist.usual_method

    # ---- secrets

    async def _find_user(self, service: str | None, user: str, database: str) -> Secret | None:
        listed = None if self.files.userlist is None else self.files.userlist.find(user)
        if listed is not None:
            return listed
        place = self._place(service, database)
        if place is not None:
            found = await self._asked.find(place, user) if is_utf8(user) else None
            if found is None and self._registry.settings.admin.as_pgbouncer:
                raise LoginRefused("no such user", PROTOCOL_VIOLATION)  # it does not hide it, either
            return found
        return NO_PASSWORD_FITS if self.files.userlist is None else None

    async def _ask_again(
        self, service: str | None, user: str, database: str, wrong: Secret | None
    ) -> Secret | None:
        place = self._place(service, database)
        return None if place is None else await self._asked.ask_again(place, user, wrong)

    def _place(self, service: str | None, database: str) -> Place | None:
        """Where users of this database are looked up; None: nowhere. A name that only the client brings leads
        to no database of that name: nobody learns here which ones there are."""
        settings = self._registry.settings
        auth, first = settings.auth, next(iter(settings.databases))
        name = settings.database_for(database, service)
        if name is None:
            user, dbname, query, name = auth.user, auth.dbname, auth.query, first
        else:
            entry = settings.database(name)
            user, dbname = entry.auth_user or auth.user, entry.auth_dbname or auth.dbname
            query = entry.auth_query or auth.query
        if user is None:
            return None
        place = dbname or (name if name in settings.databases else ASKED_WITHOUT_NAME)
        if settings.admin.as_pgbouncer:
            if not dbname and name not in settings.databases:
                place = database  # it asks there, and passes on what the server says
            self._check_place(place)
        return Place(place, user, query or DEFAULT_QUERY)

    def _check_place(self, name: str) -> None:
        """What PgBouncer takes at its start and refuses at each login."""
        registry = self._registry
        if name in registry.disabled:
            raise LoginRefused(f'authentication database "{name}" is disabled', PROTOCOL_VIOLATION)
        why = "" if registry.settings.database_for(name, None) is not None else "is not configured"
        why = "is reserved for the console" if name in RESERVED else why
        if why:
            reason = f'authentication database "{name}" {why}'
            log.error(Event.AUTH_QUERY_FAILED, database=name, reason=reason)
            raise LoginRefused("bouncer config error", PROTOCOL_VIOLATION)

    async def _ask(self, place: Place, user: str) -> Secret | None:
        seconds = self._registry.settings.auth.query_timeout_seconds
        try:
            with trio.fail_after(seconds):
                return await self._look_up(place, user, seconds)
        except trio.TooSlowError:
            reason = f"no answer within {seconds:g} s"
        except PoolerError as fault:
            reason = str(fault)
            if self._registry.settings.admin.as_pgbouncer and getattr(fault, "server_error", None):
                raise  # in the server's own words
        except ValueError as fault:
            reason = str(fault)
        except Exception:
            log.exception(Event.SOMETHING_FAILED, where="auth_query")
            reason = "a bug in the pooler"
        log.warning(Event.AUTH_QUERY_FAILED, database=place.name, user=place.user, reason=reason)
        raise NotServing("users cannot be looked up now: try again later")

    async def _look_up(self, place: Place, user: str, seconds: float) -> Secret | None:
        pool = self._registry.pool(
            place.name, place.user, None, self._secret_of(place.user), forces_user=False)
        async with pool.checkout(seconds) as session:
            rows = await session.ask(SESSION_SETTINGS, place.query, [text(user)], ANSWER_ROWS_MAX)
        found = read_answer(rows)
        if found is not None and found != NO_PASSWORD_FITS:
            self._methods[Method.MD5 if found.scram is None else Method.SCRAM] += 1
        return found

    def _secret_of(self, user: str) -> ServerSecret:
        auth = self._registry.settings.auth
        if auth.password is not None and user == auth.user:
            return ServerSecret(plain=auth.password.get_secret_value().encode())
        return ServerSecret.of(None if self.files.userlist is None else self.files.userlist.find(user))


def check_pam(user: str, password: bytes) -> bool:
    """Whether the system's PAM lets a user in. Blocks as long as its modules do."""
    if not is_utf8(user) or not password:
        return False
    pam = import_module("pam")  # python-pam: only who asks for it needs it
    return bool(pam.PamAuthenticator().authenticate(
        user.encode(), password, service=PAM_SERVICE, resetcreds=False))
