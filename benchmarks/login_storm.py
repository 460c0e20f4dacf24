"""`python -m benchmarks.login_storm COUNT`: so many logins at once, over TLS with SCRAM, from one process.

Its target comes in libpq's environment variables. Prints when it began, when the last was in (seconds since
the epoch), and how many got in.
"""

from __future__ import annotations

import asyncio
import sys
import time

import psycopg


async def storm(count: int) -> int:
    """How many got in."""
    found = await asyncio.gather(
        *(psycopg.AsyncConnection.connect(connect_timeout=60) for _ in range(count)), return_exceptions=True)
    clients = [each for each in found if isinstance(each, psycopg.AsyncConnection)]
    print(time.time(), len(clients), flush=True)
    for client in clients:
        await client.close()
    for failure in {str(each) for each in found if isinstance(each, BaseException)}:
        print(failure, file=sys.stderr)
    return len(clients)


def main() -> int:
    count = int(sys.argv[1])
    print(time.time(), end=" ")
    return 0 if asyncio.run(storm(count)) == count else 1


if __name__ == "__main__":
    sys.exit(main())
