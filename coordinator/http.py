"""/healthz, /readyz, /metrics and the ledger as JSON: read-only, what the coordinator knows now."""

from __future__ import annotations

import hmac
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any, Protocol

import structlog
import trio
from hypercorn.config import Config
from hypercorn.trio import serve
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from coordinator.alerts import SHOWN_MAX, Alert
from coordinator.etcd_health import Health, health_metrics
from coordinator.events import Event
from coordinator.ledger.ledger import Ledger
from coordinator.ledger.record import LedgerState, UnknownSchema
from coordinator.ledger.snapshot import LedgerSnapshot
from coordinator.store.api import Store, StoreUnavailable, StoreUnknown
from coordinator.strangers import Census
from coordinator.view import View

SCRAPE_TIMEOUT_SECONDS = 5.0
IDLE_SECONDS = 15.0
READ_SECONDS = 10
HEAD_BYTES_MAX = 16_384

_log = structlog.get_logger("coordinator.http")


class Shown(Protocol):
    """What the pages are made of: the coordinator."""

    @property
    def store(self) -> Store: ...
    @property
    def ledgers(self) -> dict[str, Ledger]: ...
    def views_now(self) -> Mapping[str, View]: ...
    def refused(self) -> Mapping[str, str]: ...
    def figures(self) -> Figures: ...
    async def etcd_health(self) -> Health: ...
    async def sums(self) -> list[dict[str, Any]]: ...
    async def rows(self) -> list[dict[str, Any]]: ...


class Figures:
    """Numbers at scrape time."""

    def __init__(
        self, *, leading: bool, workers_linked: int, waiting: Mapping[str, int],
        unknown_age_seconds: Mapping[str, float], unknown_old: Mapping[str, int],
        released: Mapping[str, int], requests: Mapping[str, int], no_room: Sequence[str] = (),
        alerts: Sequence[tuple[Alert, float]] = (), census: Sequence[Census] = (),
        eaten: frozenset[str] = frozenset(), unfit: frozenset[str] = frozenset(),
    ) -> None:
        self.leading = leading
        self.workers_linked = workers_linked
        self.waiting = waiting
        self.unknown_age_seconds = unknown_age_seconds
        self.unknown_old = unknown_old
        self.released = released
        self.requests = requests
        self.no_room = no_room
        self.alerts = alerts  # with their ages in seconds
        self.census = census
        self.unfit = unfit  # ledgers whose backend cannot serve, with nobody to go to
        self.eaten = eaten  # nodes at which the admin reserve is not whole


class _Scrape(Collector):
    """One scrape's metrics: made from snapshots, kept nowhere."""

    def __init__(
        self, figures: Figures, views: Mapping[str, View], held: Mapping[str, LedgerSnapshot],
        etcd: Health | None = None,
    ) -> None:
        self._etcd = etcd or Health()
        self._figures = figures
        self._views = views
        self._held = held

    def collect(self) -> Iterable[Metric]:
        figures = self._figures
        yield GaugeMetricFamily(
            "pooler_coordinator_leader", "1 while this coordinator leads", figures.leading)
        yield GaugeMetricFamily(
            "pooler_coordinator_workers", "Workers of this host with a link", figures.workers_linked)
        yield _by(GaugeMetricFamily, "pooler_coordinator_waiters", "Reservations that wait", "database",
                  figures.waiting)
        yield _by(GaugeMetricFamily, "pooler_ledger_unknown_age_seconds",
                  "Age of the oldest permit in SESSION_UNKNOWN (leader)", "database",
                  figures.unknown_age_seconds)
        yield _by(GaugeMetricFamily, "pooler_ledger_unknown_old",
                  "Permits in SESSION_UNKNOWN for more than two lease cycles (leader)", "database",
                  figures.unknown_old)
        yield _by(CounterMetricFamily, "pooler_ledger_proofs_total", "Permits freed after a look, by proof",
                  "proof", figures.released)
        yield _by(CounterMetricFamily, "pooler_etcd_requests_total", "Requests to etcd, by kind", "kind",
                  figures.requests)
        yield _by(GaugeMetricFamily, "pooler_policy_over_server",
                  "1 while a server has no room for what the active policies promise (leader)", "database",
                  {db: int(db in figures.no_room) for db in self._views if figures.leading})
        yield _by(GaugeMetricFamily, "pooler_ledger_reachable", "1 while etcd answers", "database",
                  {db: int(view.reachable) for db, view in self._views.items()})
        yield _by(GaugeMetricFamily, "pooler_ledger_lost",
                  "1 while the ledger is lost (etcd was wiped or restored) or being rebuilt", "database",
                  {db: int(view.state in ("LOST", "RECOVERING")) for db, view in self._views.items()})
        yield _by(GaugeMetricFamily, "pooler_ledger_epoch", "Backend epoch", "database",
                  {db: view.epoch.number for db, view in self._views.items() if view.epoch})
        yield _by(GaugeMetricFamily, "pooler_policy_generation", "The policy generation that grants",
                  "database", {db: view.policy.generation for db, view in self._views.items() if view.policy})
        yield _by(GaugeMetricFamily, "pooler_backend_unfit",
                  "1 while a ledger's backend cannot serve as it should and nobody else can (leader)",
                  "database", {db: int(db in figures.unfit) for db in self._views if figures.leading})
        yield _by(GaugeMetricFamily, "pooler_ledger_failover",
                  "1 while sessions of before an unplanned failover are not proven gone", "database",
                  {db: int(view.epoch.failover) for db, view in self._views.items() if view.epoch})
        yield from health_metrics(self._etcd)
        yield self._permits()
        yield self._slots()
        yield self._alerts()
        yield from self._strangers()

    def _alerts(self) -> Metric:
        """The oldest ones: what is wrong with which permit, whose it is. Each once, even while who watches a
        worker changes: a series that is there twice costs the whole scrape."""
        family = GaugeMetricFamily(
            "pooler_session_alert_age_seconds",
            "Permits that are stuck, leaked or checked out for too long: of this host's workers, and at the "
            "leader of those nobody else watches", labels=("alert", "database", "permit", "owner", "host",
                                                           "pid", "tenant"))
        one_each: dict[object, tuple[Alert, float]] = {}
        for pair in sorted(self._figures.alerts, key=itemgetter(1), reverse=True):
            one_each.setdefault(pair[0].key, pair)
        for each, age in list(one_each.values())[:SHOWN_MAX]:
            family.add_metric((str(each.what), each.db, str(each.permit), each.owner, each.host,
                               str(each.pid), each.tenant), age)
        return family

    def _strangers(self) -> Iterable[Metric]:
        family = GaugeMetricFamily(
            "pooler_server_strangers", "Ordinary sessions at a server that are not the fleet's (leader)",
            labels=("node", "user", "address"))
        for census in self._figures.census:
            for user, address, count in census.shown():
                family.add_metric((census.node, user, address), count)
        yield family
        yield _by(GaugeMetricFamily, "pooler_server_free_slots",
                  "Ordinary slots of a server that an administrator could have (leader)", "node",
                  {each.node: each.free for each in self._figures.census if each.free is not None})
        yield _by(GaugeMetricFamily, "pooler_admin_reserve_eaten",
                  "1 while fewer than adminReserve are free, for strangers have them (leader)", "node",
                  {each.node: int(each.node in self._figures.eaten) for each in self._figures.census})

    def _permits(self) -> Metric:
        family = GaugeMetricFamily(
            "pooler_session_permits", "Session permits held", labels=("database", "kind", "state"))
        for db, snapshot in self._held.items():
            counts = Counter((str(h.session.kind), str(h.session.state)) for h in snapshot.sessions)
            for (kind, state), count in counts.items():
                family.add_metric((db, kind, state), count)
        return family

    def _slots(self) -> Metric:
        family = GaugeMetricFamily(
            "pooler_session_slots", "Slots of the active policy", labels=("database", "kind"))
        for db, snapshot in self._held.items():
            limits = snapshot.active_limits
            if limits is not None:
                family.add_metric((db, "main"), limits.main)
                family.add_metric((db, "reserve"), limits.reserve)
                family.add_metric((db, "admin"), limits.admin)
        return family


def _by(
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily], name: str, text: str, label: str,
    values: Mapping[str, float],
) -> Metric:
    family = kind(name, text, labels=(label,))
    for value, number in values.items():
        family.add_metric((value,), number)
    return family


def make_scrape(
    figures: Figures, views: Mapping[str, View], held: Mapping[str, LedgerSnapshot],
    etcd: Health | None = None,
) -> bytes:
    """/metrics in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Scrape(figures, views, held, etcd))
    return generate_latest(registry)


Page = Callable[[Request], Awaitable[Response]]


def make_app(shown: Shown, token: str | None = None) -> Starlette:
    """The pages. `token` is asked of all but the health pages, whose readers (load balancers) send none."""

    async def healthz(request: Request) -> Response:
        return PlainTextResponse("alive\n")

    async def readyz(request: Request) -> Response:
        problems = not_ready(shown.views_now(), shown.refused())
        lines = [*(problems or ["ready"]), *(await shown.etcd_health()).lines()]
        return PlainTextResponse("\n".join(lines) + "\n", 503 if problems else 200)

    async def metrics(request: Request) -> Response:
        held: dict[str, LedgerSnapshot] = {}
        for db, ledger in shown.ledgers.items():
            with trio.move_on_after(SCRAPE_TIMEOUT_SECONDS):
                try:
                    held[db] = await ledger.snapshot()
                except (StoreUnavailable, StoreUnknown, UnknownSchema, ValueError):
                    continue  # pooler_ledger_reachable says so
        text = make_scrape(shown.figures(), shown.views_now(), held, await shown.etcd_health())
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    async def ledger(request: Request) -> Response:
        try:
            with trio.fail_after(SCRAPE_TIMEOUT_SECONDS):
                return JSONResponse({"ledgers": await shown.sums(), "sessions": await shown.rows()})
        except (StoreUnavailable, StoreUnknown, trio.TooSlowError) as why:
            return JSONResponse({"error": f"etcd does not answer: {why}"}, 503)
        except (UnknownSchema, ValueError) as why:
            return JSONResponse({"error": f"the ledger cannot be read: {why}"}, 503)

    pages = {"/healthz": healthz, "/readyz": readyz, "/metrics": _guarded(metrics, token),
             "/api/ledger": _guarded(ledger, token)}
    return Starlette(routes=[Route(path, page, methods=["GET"]) for path, page in pages.items()])


def _guarded(page: Page, token: str | None) -> Page:
    """The page for who gives the token; compared in constant time."""
    if token is None:
        return page
    expected = token.encode()

    async def guarded(request: Request) -> Response:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode("latin-1"), expected):
            return await page(request)
        return PlainTextResponse("a bearer token is needed\n", 401, {"www-authenticate": "Bearer"})

    return guarded


def not_ready(views: Mapping[str, View], refused: Mapping[str, str] | None = None) -> list[str]:
    """One line for each ledger that cannot grant. `refused`: why it has no policy, where that is known."""
    problems = []
    for db, view in views.items():
        if not view.reachable:
            problems.append(f"{db}: etcd does not answer")
        elif view.lost:
            problems.append(f"{db}: the ledger is lost: {view.lost}; pooler ledger rebuild makes it anew")
        elif view.state == LedgerState.RECOVERING:
            problems.append(f"{db}: the ledger is being rebuilt")
        elif not view.complete:
            missing = [name for name, value in (("ledger", view.head), ("epoch", view.epoch),
                                                ("policy", view.policy)) if value is None]
            why = (refused or {}).get(db) if view.policy is None else None
            problems.append(f"{db}: no {', no '.join(missing)} yet" + (f": {why}" if why else ""))
    return problems


async def serve_http(fd: int, shown: Shown, token: str | None = None) -> None:
    """Serves the pages on an inherited listening socket until cancelled."""
    config = Config()
    config.bind = [f"fd://{fd}"]
    config.accesslog = None
    config.errorlog = None
    config.include_server_header = False
    config.keep_alive_timeout = IDLE_SECONDS
    config.read_timeout = READ_SECONDS
    config.h11_max_incomplete_size = HEAD_BYTES_MAX
    try:
        await serve(make_app(shown, token), config, shutdown_trigger=trio.sleep_forever)  # type: ignore[arg-type]
    except OSError as fault:
        _log.error(Event.SOMETHING_FAILED, why=f"http: {fault}")

