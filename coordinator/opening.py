"""From a specification to what it names: the store, and eyes at the servers."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from coordinator.etcd_process import EtcdProcess, find_etcd
from coordinator.ledger.invariants import reaper_name
from coordinator.looks import Door, Looker, LookFailed
from coordinator.spec import CoordinatorSpec
from coordinator.store.api import Store
from coordinator.store.etcd import Tls, open_etcd


def doors(spec: CoordinatorSpec, name_of: Callable[[str], str]) -> Callable[[str], Door]:
    """How to get in at an address: the monitor login of whichever database names the host.

    `name_of` a ledger's database is the session's application_name.
    """
    logins = [each for each in spec.databases if each.monitor is not None]

    def door(address: str) -> Door:
        """A backend that a drain moved to is in no host list yet: any monitor may try."""
        named = [each for each in logins if address in each.hosts]
        for each in named or logins:
            assert each.monitor is not None  # as selected above
            return Door(each.monitor, each.dbname, name_of(each.db))
        raise LookFailed(f"{address}: no monitor login is configured for it")

    return door


def make_reaper(spec: CoordinatorSpec, tag_of: Callable[[str], str]) -> Looker:
    """The coordinator's own eyes; its sessions are `pooler:<tag>:reaper`."""
    return Looker(doors(spec, lambda db: reaper_name(tag_of(db))),
                  provider_identity=spec.node_identity == "provider")


@asynccontextmanager
async def open_store(spec: CoordinatorSpec) -> AsyncIterator[Store]:
    """The store of the specification; with `embedded`, on an etcd that lives as long as this block."""
    if not spec.etcd.embedded:
        async with open_etcd(
            spec.etcd.endpoints, user=spec.etcd.user or "", password=spec.etcd.password or "", tls=_tls(spec)
        ) as store:
            yield store
        return
    data_dir = Path(spec.etcd.data_dir) if spec.etcd.data_dir else None
    process = EtcdProcess(Path(spec.run_dir), find_etcd(), data_dir=data_dir)
    async with trio.open_nursery() as nursery:
        await nursery.start(process.run)
        async with open_etcd([process.endpoint]) as store:
            yield store
        nursery.cancel_scope.cancel()


def etcd_tls_context(spec: CoordinatorSpec) -> ssl.SSLContext | None:
    """For asking etcd over HTTPS what it says of itself; None where it speaks without TLS."""
    etcd = spec.etcd
    if not (etcd.ca or etcd.cert):
        return None
    context = ssl.create_default_context(cafile=etcd.ca)
    if etcd.cert:
        context.load_cert_chain(etcd.cert, etcd.key)
    return context


def _tls(spec: CoordinatorSpec) -> Tls | None:
    etcd = spec.etcd
    if not (etcd.ca or etcd.cert):
        return None

    def read(path: str | None) -> bytes | None:
        return Path(path).read_bytes() if path else None

    return Tls(read(etcd.ca), read(etcd.cert), read(etcd.key))
