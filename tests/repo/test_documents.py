"""The documents say what the code does."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.repo.sources import ROOT

README = ROOT / "README.md"
GENERATED = {"docs/states.md": "coordinator.ledger.document"}


@pytest.mark.parametrize(("path", "module"), GENERATED.items())
def test_a_generated_page_is_current(path: str, module: str) -> None:
    argv = [sys.executable, "-m", module]
    made = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True)
    assert (ROOT / path).read_text() == made.stdout, f"python -m {module} > {path}"


def commands(text: str) -> set[tuple[str, ...]]:
    """`pooler a b` lines of code blocks, as their leading plain words."""
    found = set()
    for block in re.findall(r"```(?:sh|console)?\n(.*?)```", text, re.DOTALL):
        for line in block.splitlines():
            match = re.match(r"(?:\$ )?pooler((?: [a-z-]+)+)", line)
            if match:
                found.add(tuple(word for word in match[1].split() if not word.startswith("-")))
    return found


def test_the_readmes_commands_exist() -> None:
    from typer.main import get_command

    from pooler.cli.main import app

    top = get_command(app)
    missing = []
    for words in commands(README.read_text()):
        command = top
        for word in words:
            known = getattr(command, "commands", None)
            if known is None:
                break  # what follows are arguments
            if word not in known:
                missing.append(" ".join(words))
                break
            command = known[word]
    assert missing == []


def test_the_readmes_make_targets_exist() -> None:
    wanted = set(re.findall(r"(?:^|`)make ([a-z-]+)", README.read_text(), re.MULTILINE))
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert wanted
    assert wanted <= targets


def test_the_readme_tells_the_exit_code_of_a_failed_demonstration_and_that_of_make() -> None:
    told = " ".join(README.read_text().split())
    assert re.search(r"`[.]venv/bin/pooler demo --break [^`]+`[^.]*? exit 1", told)
    assert re.search(r"`make demo ARGS=\"--break [^`]+` [^.]*ends with 2", told)
    failing = ["make", "--old-file=setup", "demo", "PYTHON=false"]  # the demonstration ends with 1
    assert subprocess.run(failing, cwd=ROOT, capture_output=True, check=False).returncode == 2


def test_every_link_of_a_document_leads_somewhere() -> None:
    dead = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in [README, ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text())
        if not (page.parent / target).exists()
    ]
    assert dead == []


def test_every_decision_tells_context_choice_and_price() -> None:
    pages = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    assert pages
    for page in pages:
        assert re.match(r"\d{4}-[a-z0-9-]+\.md$", page.name), page.name
        headings = re.findall(r"^## (.+)$", page.read_text(), re.MULTILINE)
        assert headings == ["Context", "Choice", "Price"], page.name
