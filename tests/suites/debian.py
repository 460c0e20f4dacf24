"""Sources from Debian, through apt with lists of its own: the machine's are left as they are."""

from __future__ import annotations

from pathlib import Path

from pooler.demo.process import PartFailed
from tests.suites.sources import run

KEYS = Path("/usr/share/keyrings/debian-archive-keyring.gpg")


class Apt:
    """apt-get with the source packages of some suites, from where this machine gets its packages; they are
    fetched into `home`."""

    def __init__(self, home: Path, suites: tuple[str, ...] = ()) -> None:
        self.home = home
        self._own = home / "apt"
        for each in ("lists/partial", "archives/partial"):
            (self._own / each).mkdir(parents=True, exist_ok=True)
        (self._own / "sources.list").write_text("".join(self._lines(suites)))
        self._get("update")

    def source(self, package: str, version: str) -> Path:
        """The description (.dsc) of a source package; what it lists lies beside it. Raises PartFailed."""
        self._get("source", "--download-only", f"{package}={version}")
        return self._one(f"{package}_*.dsc")

    def package(self, name: str, version: str) -> Path:
        """A binary package, unpacked and not installed. Raises PartFailed."""
        self._get("download", f"{name}={version}")
        into = self.home / name
        run("dpkg-deb", "-x", self._one(f"{name}_*.deb"), into)
        return into

    def addresses(self, package: str) -> list[str]:
        """Of the files of the newest source package of that name, those with sources of its authors."""
        said = self._get("source", "--print-uris", package)
        found = [line.split()[0].strip("'") for line in said.splitlines() if line.startswith("'")]
        return [each for each in found if ".orig" in each]

    def fetch(self, address: str, into: Path) -> Path:
        """One file. Raises PartFailed."""
        run("/usr/lib/apt/apt-helper", "download-file", address, into)
        return into

    def _get(self, *words: str) -> str:
        own = self._own
        options = [f"Dir::Etc::sourcelist={own}/sources.list", "Dir::Etc::sourceparts=-",
                   f"Dir::State::lists={own}/lists", f"Dir::Cache={own}", "APT::Sandbox::User=root"]
        return run("apt-get", *(word for option in options for word in ("-o", option)), *words, cwd=self.home)

    def _one(self, pattern: str) -> Path:
        found = sorted(self.home.glob(pattern))
        if len(found) != 1:
            raise PartFailed(f"{self.home} has {len(found)} files {pattern}, not one")
        return found[0]

    def _lines(self, suites: tuple[str, ...]) -> list[str]:
        said = run("apt-get", "indextargets", "--format", "$(SITE) $(RELEASE)", "Created-By: Packages")
        places = {(site, release) for site, release in map(str.split, said.splitlines()) if "/debian" in site}
        if suites:
            sites = {site for site, release in places if "-" not in release}
            places = {(site, suite) for site in sites for suite in suites}
        return [f"{kind} [signed-by={KEYS}] {site} {release} main\n"
                for site, release in sorted(places) for kind in ("deb", "deb-src")]


def installed(package: str) -> str:
    """Its version on this machine. Raises PartFailed."""
    return run("dpkg-query", "-W", "-f", "${Version}", package).strip()
