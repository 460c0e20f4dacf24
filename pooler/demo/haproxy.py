"""A real HAProxy in the foreground with a given configuration."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

from pooler.demo.process import Child, PartFailed, accepts

_MORE_PLACES = "/usr/sbin:/usr/local/sbin"  # an ordinary user's PATH often lacks them


def find_program(name: str) -> Path | None:
    """On PATH or where daemons are installed."""
    found = shutil.which(name) or shutil.which(name, path=_MORE_PLACES)
    return Path(found) if found else None


class HAProxy:
    """One HAProxy. `ports` are the frontends that must accept before `start` returns."""

    def __init__(self, directory: Path, configuration: str, ports: list[int]) -> None:
        binary = find_program("haproxy")
        if binary is None:
            raise PartFailed("no haproxy on PATH: install Debian's haproxy")
        self.binary = binary
        self.file = directory / "haproxy.cfg"
        self.file.write_text(configuration)
        self.ports = ports
        self.child: Child | None = None

    def check(self) -> str:
        """What HAProxy says about the configuration, empty if nothing. Raises PartFailed if refused."""
        done = subprocess.run([self.binary, "-c", "-q", "-f", self.file], capture_output=True, text=True,
                              check=False)
        if done.returncode != 0:
            raise PartFailed(f"haproxy refuses {self.file}: {done.stderr.strip()}")
        return done.stderr.strip()

    def start(self, die_signal: signal.Signals | None = signal.SIGKILL) -> None:
        """Raises PartFailed when it refuses the configuration or does not accept on its ports."""
        self.check()
        self.child = Child([self.binary, "-db", "-f", self.file], self.file.with_name("haproxy.log"),
                           die_signal=die_signal)
        self.child.wait_until(lambda: all(accepts(port) for port in self.ports), "HAProxy accepts")

    def stop(self) -> None:
        """At once: open connections are cut."""
        if self.child is not None:
            self.child.stop(signal.SIGTERM)


def service(name: str, port: int, servers: dict[str, int], more: str = "") -> str:
    """A plain TCP listen section, for the tests that need a HAProxy and not the fleet's rendered file."""
    lines = [f"listen {name}", f"    bind 127.0.0.1:{port}", "    mode tcp", "    balance leastconn"]
    lines += [f"    server {server} 127.0.0.1:{at} {more}".rstrip() for server, at in servers.items()]
    return "\n".join(lines) + "\n"


def plain(*sections: str) -> str:
    """A whole configuration: sensible time-outs and these sections."""
    user = "" if os.geteuid() else "    user nobody\n"
    return (f"global\n    maxconn 4000\n{user}defaults\n    mode tcp\n    timeout connect 5s\n"
            "    timeout client 24h\n    timeout server 24h\n" + "".join(sections))
