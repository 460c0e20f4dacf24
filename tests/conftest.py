"""What every test shares: the fixtures of tests/support, and seeds that are printed to repeat a run.

pytest-randomly prints and sets the seed of order and chance (`--randomly-seed=N` repeats it); hypothesis
prints the `@reproduce_failure` blob of a failing example.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

pytest_plugins = (
    "tests.support.postgres",
    "tests.support.etcd",
    "tests.support.proxies",
    "tests.support.fleet",
    "tests.support.rawclient",
    "tests.support.relays",
    "tests.support.scripted",
    "tests.support.nameserver",
)

settings.register_profile(
    "quick", max_examples=100, deadline=None, print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("thorough", parent=settings.get_profile("quick"), max_examples=5_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))
