"""The TLS of one worker as it is now: what clients are offered, and what is asked of servers.

A reload gives new handshakes new certificates; connections that stand keep theirs. What cannot be used is
told and changes nothing.
"""

from __future__ import annotations

from pooler.errors import UsageFault
from pooler.net.tls_context import ClientTls, ServerTls, TlsFault, client_tls, server_tls
from pooler.settings import ClientTlsSettings, ServerTlsSettings, Settings


class Encryption:
    """Both sides. Raises UsageFault where the settings at the start cannot be used."""

    def __init__(self, settings: Settings) -> None:
        self._clients, self._servers = settings.client_tls, settings.server_tls
        try:
            self.clients: ClientTls | None = client_tls(settings.client_tls)
            self.servers: ServerTls | None = server_tls(settings.server_tls)
        except TlsFault as fault:
            raise UsageFault(f"TLS: {fault.setting}: {fault}") from fault

    def take(self, settings: Settings) -> tuple[list[str], bool]:
        """Take over changed settings → what is wrong with them, and whether sessions opened by the old ones
        are to be replaced: where a setting changed, not where only the content of a file did."""
        problems: list[str] = []
        replaces = False
        if settings.client_tls != self._clients:
            try:
                self.clients = client_tls(settings.client_tls)
                self._clients = settings.client_tls
            except TlsFault as fault:
                problems.append(f"client_tls.{fault.setting}: {fault}; the old one stays in use")
        if settings.server_tls != self._servers:
            try:
                self.servers = server_tls(settings.server_tls)
                replaces = _words(settings.server_tls) != _words(self._servers)
                self._servers = settings.server_tls
            except TlsFault as fault:
                problems.append(f"server_tls.{fault.setting}: {fault}; the old one stays in use")
        return problems, replaces


def _words(settings: ClientTlsSettings | ServerTlsSettings) -> dict[str, str]:
    return {name: str(value) for name, value in settings}
