"""Which sessions a runner holds, written down with plain lists. Imports nothing of ours."""


class PlainResidency:
    """Least recently used first.

    Args:
        capacity: sessions that fit.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.order: list[str] = []
        self.chunks: dict[str, int] = {}
        self.evicted: list[str] = []
        self.hooks: list[tuple[str, str]] = []

    def tick(self, name: str, chunk: int) -> bool:
        """Whether the tick runs; if it does, the session is the most recently used."""
        if name not in self.order:
            if chunk > 0:
                return False
            while len(self.order) >= self.capacity:
                oldest = self.order.pop(0)
                del self.chunks[oldest]
                self.hooks.append(("close", oldest))
                self.evicted.append(oldest)
            self.chunks[name] = 0
        else:
            self.order.remove(name)
        self.order.append(name)
        return True

    def done(self, name: str) -> None:
        """The tick's chunk was committed."""
        self.chunks[name] += 1

    def release(self, name: str, hook: str) -> None:
        """The session goes, whether it is there or not."""
        if name in self.order:
            self.order.remove(name)
            del self.chunks[name]
        self.hooks.append((hook, name))
