"""Who may import whom: the contracts of pyproject.toml, and the short list of what the pooler may know of the
coordinator."""

from __future__ import annotations

import grimp
import pytest
from importlinter import cli

from tests.repo.sources import ROOT

# The link and the ledger's plain values; the session table is a file both sides map; logs and what is said of
# a faulty file are alike on both sides, with the same secrets hidden.
KNOWN_OF_COORDINATOR = {
    "coordinator.link", "coordinator.ledger.states", "coordinator.ledger.record", "coordinator.ledger.keys",
    "coordinator.ledger.tickets",
    "coordinator.ledger.living", "coordinator.session_table", "coordinator.logs", "coordinator.yaml_faults",
    "coordinator.bounded_yaml",
}
MAY_KNOW_ALL = ("pooler.cli", "pooler.demo")


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph("pooler", "coordinator", "chaos", "benchmarks", cache_dir=None)


def test_the_declared_contracts_hold(capsys: pytest.CaptureFixture[str]) -> None:
    status = cli.lint_imports(config_filename=str(ROOT / "pyproject.toml"), no_cache=True)
    assert status == 0, capsys.readouterr().out


def test_the_pooler_knows_only_the_coordinators_surface(graph: grimp.ImportGraph) -> None:
    strays = {
        (module, imported)
        for module in graph.modules
        if module.startswith("pooler") and not module.startswith(MAY_KNOW_ALL)
        for imported in graph.find_modules_directly_imported_by(module)
        if imported.startswith("coordinator") and imported not in KNOWN_OF_COORDINATOR
    }
    assert strays == set()


def test_nothing_imports_what_only_stands_on_top(graph: grimp.ImportGraph) -> None:
    strays = {
        (module, imported)
        for module in graph.modules if module.startswith(("pooler", "coordinator"))
        for imported in graph.find_modules_directly_imported_by(module)
        if imported.startswith(("chaos", "benchmarks", "tests"))
    }
    assert strays == set()
