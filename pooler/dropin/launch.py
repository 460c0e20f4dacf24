"""`pooler pgbouncer FILE.ini`: starts what the ini says and stays as long as PgBouncer would.

Everything that PgBouncer checks before it serves is checked in its order, in its words, with its exit code;
what was made is gone at the end, however it ends (but for kill -9, whose rest the next start clears).
"""

from __future__ import annotations

import os
import pwd
import shutil
import sys
from contextlib import ExitStack
from pathlib import Path

import structlog
import trio

from coordinator.logs import set_up_logging
from pooler.dropin.bouncer import BouncerSupervisor
from pooler.dropin.logpump import LogPump
from pooler.dropin.pidfile import CannotStart, check_pidfile, is_answered, remove_pidfile, write_pidfile
from pooler.dropin.place import make_run_dir
from pooler.dropin.reading import Bouncer
from pooler.dropin.setup import Launch, Setup, first_look, log_targets, path_of, unix_socket_of
from pooler.dropin.takeover import Predecessor
from pooler.dropin.words import of_the_ini
from pooler.errors import UsageFault
from pooler.net.auth_files import AuthFiles
from pooler.settings import Settings, load

log = structlog.get_logger()


def run_as_pgbouncer(launch: Launch) -> None:
    """Serve until told to stop. Raises CannotStart, and what the supervisor raises."""
    bouncer = first_look(launch)
    _become(launch.user or bouncer.text("user"))
    pidfile = path_of(bouncer, "pidfile", launch)
    old = _find_old(bouncer, launch, pidfile)
    if launch.daemon:
        if pidfile is None:
            raise CannotStart("daemon needs pidfile configured")
        _go_daemon()
    with ExitStack() as made:
        if pidfile is not None:
            if old is not None:
                pidfile.unlink(missing_ok=True)
            write_pidfile(pidfile)
            made.callback(remove_pidfile, pidfile)
        pump = LogPump(log_targets(bouncer, launch))
        pump.start()
        made.callback(pump.close)
        run_dir = make_run_dir()
        made.callback(shutil.rmtree, run_dir, ignore_errors=True)
        _serve(launch, run_dir, pump, old)


def _serve(launch: Launch, run_dir: Path, pump: LogPump, old: Predecessor | None) -> None:
    setup = Setup(launch, run_dir)
    config, _ = setup.write()
    settings = _settings_of(config, launch)
    set_up_logging(settings.log.format, settings.log.level)
    for note in setup.notes:
        log.warning("config_warning", text=note)
    AuthFiles.read(settings.auth)

    def regenerate() -> None:
        _, fresh = setup.write()
        _settings_of(config, launch)
        pump.retarget(log_targets(fresh, launch))

    trio.run(BouncerSupervisor(config, settings, regenerate, old).run)


def _settings_of(config: Path, launch: Launch) -> Settings:
    """What was made of the ini. Raises UsageFault in the ini's words."""
    try:
        return load(config)
    except UsageFault as refused:
        raise UsageFault(of_the_ini(str(refused), launch.ini)) from None


def _find_old(bouncer: Bouncer, launch: Launch, pidfile: Path | None) -> Predecessor | None:
    """The process to take over from with -R, None where there is none. Raises CannotStart."""
    unix_socket = unix_socket_of(bouncer, launch)
    if launch.reboot and unix_socket is None:
        raise CannotStart("cannot reboot if unix dir not configured")
    if unix_socket is not None and is_answered(unix_socket):
        if not launch.reboot:
            raise CannotStart("unix socket is in use, cannot continue")
        return Predecessor.at(unix_socket)
    if pidfile is not None:
        check_pidfile(pidfile)
    return None


def _become(name: str) -> None:
    """Another user, for good; root stays root where none is named (PgBouncer refuses that)."""
    if not name:
        return
    try:
        account = pwd.getpwnam(name)
    except KeyError:
        raise CannotStart(f"could not find user '{name}' to switch to") from None
    if account.pw_uid == os.geteuid():
        return
    try:
        os.initgroups(name, account.pw_gid)
        os.setgid(account.pw_gid)
        os.setuid(account.pw_uid)
    except OSError as fault:
        raise CannotStart(f"failed to switch to user '{name}': {fault.strerror}") from None


def _go_daemon() -> None:
    """A session of its own, without a terminal; the process that was started ends with 0."""
    sys.stdout.flush()
    sys.stderr.flush()
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    if null > 2:
        os.close(null)
    if os.fork() > 0:
        os._exit(0)
    os.setsid()
    if os.fork() > 0:
        os._exit(0)
