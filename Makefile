# Every target makes its own environment first (scripts/setup); `make` alone lists them.
PYTHON := .venv/bin/python
PROCESSES ?= 2

.PHONY: help setup demo lint test bench bench-quick chaos clean

help:
	@echo "make demo         the whole fleet on this machine, with kills and a failover, and the audit"
	@echo "make test         ruff, mypy, then every test"
	@echo "make lint         ruff and mypy only"
	@echo "make bench        against PgBouncer, all of it;  make bench-quick  in under 90 seconds"
	@echo "make chaos        the scenarios that break things on purpose"

setup:
	@scripts/setup

demo: setup
	@$(PYTHON) -m pooler.cli.main demo $(ARGS)

lint: setup
	@$(PYTHON) -m ruff check .
	@$(PYTHON) -m mypy

test: lint
	$(PYTHON) -m pytest -q -n $(PROCESSES) --dist loadfile $(ARGS)

bench: setup
	@$(PYTHON) -m benchmarks full $(ARGS)

bench-quick: setup
	@$(PYTHON) -m benchmarks quick $(ARGS)

chaos: setup
	@$(PYTHON) -m chaos run all $(ARGS)

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info benchmarks/out
