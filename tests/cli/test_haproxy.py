"""The rendered haproxy.cfg: what it says, that a real HAProxy takes it, and what it does then."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import trio

from pooler.demo.process import free_ports
from pooler.haproxy import HAProxyRefused, render_haproxy
from pooler.settings import Settings, load
from tests.cli.conftest import CONFIG, Pooler
from tests.support.proxies import RunHAProxy

PROXY_V2 = b"\r\n\r\n\x00\r\nQUIT\n"


def test_each_service_has_its_port_its_readiness_page_and_a_server_for_each_worker(config: Path) -> None:
    text = render_haproxy(load(config))
    sections = {
        found[1]: found[2] for found in re.finditer(r"listen orders_(\w+)\n(.*?)(?=\nlisten|\Z)", text, re.S)
    }
    expected = {
        "primary": (5433, "write", 6440),
        "replica": (5434, "read", 6460),
        "default": (5436, "write", 6480),
        "offline": (5438, "offline", 6500),
    }
    assert sections.keys() == expected.keys()
    for name, (port, role, base) in expected.items():
        assert f"bind 127.0.0.1:{port}\n" in sections[name]
        assert f"uri /readyz/{role} " in sections[name]
        for index in (0, 1):
            server = f"server worker{index} 127.0.0.1:{base + index} id {index + 1} "
            assert f"{server}check agent-port {9700 + index}\n" in sections[name]


@pytest.mark.parametrize(
    "line",
    [
        "balance leastconn",
        "timeout connect 5s",
        "timeout client 24h",
        "timeout server 24h",
        "timeout tunnel 24h",
        "option clitcpka",
        "option srvtcpka",
        "agent-inter 500ms",
        "slowstart 10s",
        "send-proxy-v2 check-send-proxy",
    ],
)
def test_the_agreed_settings_are_there(config: Path, line: str) -> None:
    assert line in render_haproxy(load(config))


def test_sessions_are_never_shut_down_on_a_drain(config: Path) -> None:
    settings_only = re.sub(r"^\s*#.*$", "", render_haproxy(load(config)), flags=re.M)
    assert "shutdown-sessions" not in settings_only


def test_a_port_that_a_server_has_is_refused_by_name(config: Path) -> None:
    config.write_text(CONFIG.replace("10.0.0.11:5432", "127.0.0.1:5433"))
    with pytest.raises(HAProxyRefused, match=r"services\.primary\.haproxy_port: 5433 is the port of server"):
        render_haproxy(load(config))
    assert "5433" in render_haproxy(load(config), bind="10.0.0.1")


def test_a_service_of_another_name_needs_a_port_of_its_own(config: Path) -> None:
    config.write_text(CONFIG.replace("offline:", "reports:"))
    with pytest.raises(HAProxyRefused, match=r"services\.reports\.haproxy_port: is required"):
        render_haproxy(load(config))


def test_several_hosts_give_one_server_for_each_worker_of_each(config: Path) -> None:
    text = render_haproxy(load(config), hosts=["db1", "10.0.0.7"])
    assert "server db1_worker1 db1:6441 id 2 check agent-port 9701" in text
    assert "server 10.0.0.7_worker1 10.0.0.7:6441 id 18 check agent-port 9701" in text


@pytest.mark.haproxy
def test_a_real_haproxy_takes_it_without_a_warning(
    pooler: Pooler, config: Path, run_haproxy: RunHAProxy, tmp_path: Path
) -> None:
    ports = {name: free_ports() for name in ("primary", "replica", "default", "offline")}
    text = CONFIG
    for name, port in ports.items():
        text = re.sub(rf"(  {name}: {{)", rf"\1haproxy_port: {port}, ", text)
    config.write_text(text)
    done = pooler("haproxy", "render", "-c", config)
    assert done.code == 0
    haproxy = run_haproxy(done.out, list(ports.values()))
    assert haproxy.check() == ""


@pytest.mark.haproxy
async def test_clients_reach_a_ready_worker_with_a_proxy_header_and_checks_go_without(
    config: Path, run_haproxy: RunHAProxy
) -> None:
    front, work, http, agent = (free_ports(2) for _ in range(4))
    settings = live_settings(config, front, work, http, agent)
    asked: list[tuple[int, bytes]] = []

    async def serve(port: int, answer: bytes | None) -> None:
        async def one(stream: trio.SocketStream) -> None:
            asked.append((port, await stream.receive_some(4096)))
            await stream.send_all(answer if answer is not None else b"served by %d" % port)
            await stream.aclose()

        await nursery.start(trio.serve_tcp, one, port)

    async with trio.open_nursery() as nursery:
        for index, status in ((0, b"503 no"), (1, b"200 ok")):
            nursery.start_soon(serve, work + index, None)
            nursery.start_soon(serve, http + index, b"HTTP/1.1 %s\r\nContent-Length: 0\r\n\r\n" % status)
        await trio.testing.wait_all_tasks_blocked()
        await trio.to_thread.run_sync(run_haproxy, render_haproxy(settings), [])
        with trio.fail_after(20):
            answer = b""
            while answer != b"served by %d" % (work + 1):
                answer = await ask(front)
        nursery.cancel_scope.cancel()
    assert all(data.startswith(PROXY_V2) for port, data in asked if port in (work, work + 1))
    checks = [data for port, data in asked if port in (http, http + 1)]
    assert checks
    assert all(data.startswith(b"GET /readyz/write HTTP/1.1\r\n") for data in checks)


async def ask(port: int) -> bytes:
    """What the service answers now; empty while HAProxy has nobody to ask."""
    try:
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            await stream.send_all(b"hello")
            return bytes(await stream.receive_some(100))
    except (OSError, trio.BrokenResourceError):
        await trio.lowlevel.checkpoint()
        return b""


def live_settings(config: Path, front: int, work: int, http: int, agent: int) -> Settings:
    """Two workers of one service on these ports."""
    config.write_text(f"""\
fleet: {{name: live, workers: 2, listen: "127.0.0.1:{free_ports()}"}}
services: {{primary: {{worker_ports: {work}, database_role: write, haproxy_port: {front}}}}}
etcd: embedded
databases: {{orders: {{hosts: ["10.0.0.11:5432"], policy: policy.yaml}}}}
auth: {{type: trust}}
http: {{listen: "127.0.0.1:{free_ports()}", worker_ports: {http}, agent_ports: {agent}}}
""")
    return load(config)
