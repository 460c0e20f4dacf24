"""haproxy.cfg for a fleet: one listen section per service, one server per worker. Pure.

A worker is healthy for a service when its /readyz/<role> says so, and its agent port tells how much room it
has. The health check goes to the worker's HTTP port without a PROXY header, clients' connections to
its service port with one. Sources: HAProxy 2.6's configuration manual, 4.2 http-check connect, 5.2 server
options.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pooler.errors import UsageFault
from pooler.settings import Address, ServiceSettings, Settings
from pooler.settings_checks import haproxy_port
from pooler.settings_host import WORKERS_MAX

WEIGHT = 100  # the agent answers in per cent of it

_HEAD = """\
# Written by `pooler haproxy render` for fleet {fleet}: edit pooler.yaml and render it again.
global
    log stdout format raw local0 notice

defaults
    mode tcp
    log global
    option tcplog
    option dontlognull
    option clitcpka
    option srvtcpka
    option redispatch
    retries 3
    timeout connect 5s
    timeout client 24h
    timeout server 24h
    timeout tunnel 24h
    timeout check 2s
"""

_LISTEN = """
listen {name}
    bind {bind}
    balance leastconn
    option httpchk
    # server ids are numbered so that each worker is asked at its own HTTP port
    http-check connect{addr} port srv_id,sub(1),mod({step}),add({http_base})
    http-check send meth GET uri /readyz/{role} ver HTTP/1.1 hdr Host pooler hdr Connection close
    http-check expect status 200
    # a worker that drains takes no new clients and keeps the old ones: no shutdown-sessions here
    default-server weight {weight} inter 1s fastinter 250ms downinter 500ms fall 3 rise 1 slowstart 10s
    default-server agent-check agent-inter 500ms send-proxy-v2 check-send-proxy
"""


class HAProxyRefused(UsageFault):
    """No working haproxy.cfg can be made of this config."""


def render_haproxy(settings: Settings, *, bind: str | None = None, hosts: Sequence[str] = ()) -> str:
    """The file's text. `bind` is the services' address (default: the host of `fleet.listen`); `hosts` are
    the hosts that run this config (default: the one host of the config).

    Raises HAProxyRefused when a service has no port, or a configured server has that host and port.
    """
    if not settings.services:
        raise HAProxyRefused("services: none is configured, so there is nothing for HAProxy to offer")
    fronts = {name: _front(settings, name, bind) for name in settings.services}
    sections = [_HEAD.format(fleet=settings.fleet.name)]
    for name, service in settings.services.items():
        sections.append(_section(settings, name, service, fronts[name], hosts))
    return "".join(sections)


def _front(settings: Settings, name: str, bind: str | None) -> Address:
    port = haproxy_port(name, settings.services[name])
    if port is None:
        raise HAProxyRefused(f"services.{name}.haproxy_port: is required for a service of this name")
    front = Address(bind or settings.fleet.listen_host, port)
    for entry, database in settings.databases.items():
        for server in database.hosts:
            local = server.is_loopback() and (front.is_loopback() or front.is_wildcard())
            if server.port == port and (local or server.host == front.host):
                raise HAProxyRefused(f"services.{name}.haproxy_port: {port} is the port of server {server} "
                                     f"of databases.{entry}: set another haproxy_port")
    return front


def _section(
    settings: Settings, name: str, service: ServiceSettings, front: Address, hosts: Sequence[str]
) -> str:
    head = _LISTEN.format(
        name=f"{settings.fleet.name}_{name}", bind=_bind(front), addr=_check_address(settings, hosts),
        step=WORKERS_MAX, http_base=settings.http.worker_ports, role=service.database_role, weight=WEIGHT)
    return head + "".join(f"    {line}\n" for line in _servers(settings, service, hosts))


def _bind(front: Address) -> str:
    return f"*:{front.port}" if front.host == "0.0.0.0" else str(front)


def _check_address(settings: Settings, hosts: Sequence[str]) -> str:
    """Where the HTTP ports are, if not where the workers are. Only sensible with a single host."""
    http = settings.http.listen
    if hosts or http.is_wildcard() or http.host == _reachable(settings.fleet.host_for_workers):
        return ""
    return f" addr {http.host}"


def _servers(settings: Settings, service: ServiceSettings, hosts: Sequence[str]) -> Iterator[str]:
    for number, host in enumerate(hosts or [_reachable(settings.fleet.host_for_workers)]):
        for index in range(settings.fleet.workers):
            name = f"{_word(host)}_worker{index}" if hosts else f"worker{index}"
            at = Address(host, service.worker_ports + index)
            agent = settings.http.agent_ports + index
            yield f"server {name} {at} id {number * WORKERS_MAX + index + 1} check agent-port {agent}"


def _reachable(host: str) -> str:
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def _word(host: str) -> str:
    return "".join(c if c.isalnum() or c in "-." else "_" for c in host)
