"""Sessions on a real broker, a host in the test's loop, a scripted worker."""

from support.worlds import host, neighbour, reducer, stranger, worker, world

__all__ = ["host", "neighbour", "reducer", "stranger", "worker", "world"]
