"""`python -m benchmarks.idle COUNT`: so many logged-in clients that do nothing, until stdin ends.

Its target comes in libpq's environment variables. Prints one line when all are logged in: a process of its
own, so that its memory and descriptors are not those of what is measured.
"""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor

from pooler.demo.client import RawClient

THREADS = 8


def login(_: int) -> RawClient:
    client = RawClient(os.environ["PGHOST"], int(os.environ["PGPORT"]), 60)
    return client.login(os.environ["PGUSER"], os.environ["PGPASSWORD"], os.environ["PGDATABASE"])


def main() -> int:
    with ThreadPoolExecutor(THREADS) as pool:
        clients = list(pool.map(login, range(int(sys.argv[1]))))
    print(len(clients), flush=True)
    sys.stdin.read()
    for client in clients:
        client.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
