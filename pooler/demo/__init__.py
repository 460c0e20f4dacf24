"""The real parts that the demonstration, the tests and the benchmarks run on one machine.

PostgreSQL, etcd and HAProxy on loopback in temporary directories, a load that records what it was told, and
judges that read the server's own log. Nothing of the data plane imports this package.
"""
