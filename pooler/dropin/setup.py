"""From an ini to the config of the fleet beneath it, at the start and at each reload."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pooler.dropin.carry import Circumstances, carry
from pooler.dropin.files import read_ini, write_config
from pooler.dropin.ini import IniRefused
from pooler.dropin.logpump import LogTargets
from pooler.dropin.pidfile import CannotStart
from pooler.dropin.place import free_ports
from pooler.dropin.reading import Bouncer
from pooler.errors import UsageFault
from pooler.settings_host import WORKERS_MAX

PEER_PORT = 6432
ROUND_ROBIN = "round-robin"
HEAD = "# Made from {ini} by `pooler pgbouncer`, and gone when it ends: change the ini instead.\n"


@dataclass(frozen=True, slots=True)
class Launch:
    """The command line. `base` is the folder it was given in."""

    ini: str
    base: Path
    quiet: bool = False
    daemon: bool = False
    reboot: bool = False
    verbose: int = 0
    user: str = ""


class Setup:
    """One drop-in's files. `run_dir` and the ports stay as long as it lives."""

    def __init__(self, launch: Launch, run_dir: Path) -> None:
        self.launch = launch
        self.run_dir = run_dir
        self._workers = _workers(os.environ.get("POOLER_WORKERS") or "1")
        self._http, self._worker_http, self._agent = free_ports((1, self._workers, self._workers))
        self.notes: list[str] = []
        self.missing: list[str] = []
        self._first: Bouncer | None = None  # the settings that no reload changes keep its values

    def write(self) -> tuple[Path, Bouncer]:
        """Read the ini and write the config; (pooler.yaml, the ini).

        Raises IniRefused, and CannotStart for what must not be ignored.
        """
        bouncer = read_ini(self.launch.ini, self.launch.base)
        self.missing = []
        self._first = self._first or bouncer
        carried = carry(bouncer, self._circumstances(bouncer))
        if carried.grave:
            raise IniRefused([str(note) for note in carried.grave])
        self.notes = [*self.missing, *(str(note) for note in carried.notes)]
        return write_config(self.run_dir, carried, HEAD.format(ini=self.launch.ini), overwrite=True), bouncer

    def _circumstances(self, bouncer: Bouncer) -> Circumstances:
        stand_in = self.run_dir / "userlist.txt"
        if not stand_in.exists():
            stand_in.touch(mode=0o600)
        fleet: dict[str, Any] = {"run_dir": str(self.run_dir), "workers": self._workers}
        more: dict[str, dict[str, Any]] = {
            "fleet": fleet,
            "http": {"listen": f"127.0.0.1:{self._http}", "worker_ports": self._worker_http,
                     "agent_ports": self._agent},
            "log": {"format": "console", **({"level": "debug"} if self.launch.verbose else {})},
            "admin": {"show_peers": show_peers(bouncer), "show_hosts": show_hosts(bouncer),
                      "show_config": show_config(bouncer, self._first or bouncer, self.launch.ini)},
        }
        if endpoints := os.environ.get("POOLER_ETCD"):
            plain = [each.strip().removeprefix("http://").rstrip("/") for each in endpoints.split(",")]
            more["etcd"] = {"embedded": False, "endpoints": plain}
        named = path_of(bouncer, "auth_file", self.launch)
        if named is not None and not os.access(named, os.R_OK):  # PgBouncer starts without it, too
            more["auth"] = {"file": str(stand_in)}
            self.missing = [f"auth_file {named} cannot be read: no user is known until a reload finds it"]
        name = os.environ.get("POOLER_FLEET") or f"pgbouncer-{bouncer.whole('listen_port')}"
        return Circumstances(self.launch.base, name, stand_in, as_pgbouncer=True, has_ipv6=_has_ipv6(),
                             more=more)


def show_config(bouncer: Bouncer, first: Bouncer, ini: str) -> list[list[str | None]]:
    """SHOW CONFIG as PgBouncer has it: key, value, default, changeable. What a reload does not take has its
    value of `first`."""
    rows: list[list[str | None]] = []
    for name, fresh in sorted(bouncer.settings.items()):
        setting = fresh if fresh.known.reloadable else first.settings[name]
        text = ini if name == "conffile" else setting.text
        if setting.known.kind == "whole" and name != "unix_socket_mode":
            text = str(setting.value)
        elif name == "unix_socket_mode":
            text = f"{bouncer.whole(name):04o}"
        elif setting.known.kind == "choice":
            text = str(setting.value)
        rows.append([name, text, setting.known.default, "yes" if setting.known.reloadable else "no"])
    return rows


def show_peers(bouncer: Bouncer) -> list[list[str | int | None]]:
    """SHOW PEERS: id, host, port, pool_size."""
    return [[int(peer.name), peer.text("host"), peer.whole("port") or PEER_PORT, peer.whole("pool_size")]
            for peer in bouncer.peers.values()]


def show_hosts(bouncer: Bouncer) -> list[list[str | int | None]]:
    """What SHOW DATABASES says of where an entry's servers are: name, host as written, load_balance_hosts."""
    return [[part.name, part.text("host"),
             (part.text("load_balance_hosts") or ROUND_ROBIN) if "," in (part.text("host") or "") else None]
            for part in bouncer.databases.values()]


def log_targets(bouncer: Bouncer, launch: Launch) -> LogTargets:
    """Where this ini wants its log."""
    named = bouncer.text("logfile")
    return LogTargets(
        file=launch.base / Path(named).expanduser() if named else None,
        to_stderr=not (launch.quiet or launch.daemon),
        facility=bouncer.text("syslog_facility") if bouncer.value("syslog") else "",
        ident=bouncer.text("syslog_ident"))


def path_of(bouncer: Bouncer, name: str, launch: Launch) -> Path | None:
    """A setting that is a path, None if it is empty."""
    named = bouncer.text(name)
    return launch.base / Path(named).expanduser() if named else None


def unix_socket_of(bouncer: Bouncer, launch: Launch) -> Path | None:
    """Where the unix socket is."""
    folder = path_of(bouncer, "unix_socket_dir", launch)
    return None if folder is None else folder / f".s.PGSQL.{bouncer.whole('listen_port')}"


def first_look(launch: Launch) -> Bouncer:
    """The ini before anything was made. Raises CannotStart with every fault."""
    try:
        return read_ini(launch.ini, launch.base)
    except UsageFault as refused:
        raise CannotStart(f"{refused}\ncannot load config file") from None


def _workers(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= WORKERS_MAX):
        raise CannotStart(f'POOLER_WORKERS is "{text}": it must be a number from 1 to {WORKERS_MAX}')
    return int(text)


def _has_ipv6() -> bool:
    if not socket.has_ipv6:
        return False
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True
