"""The memory plan written down as sums over plain numbers. Imports nothing of ours."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PlainGeometry:
    """Everything that the plan depends on.

    Args:
        slots: worker-local slot of each logical branch.
        cross: (tokens, heads) of each cross-attention cache.
    """

    layers: int
    heads: int
    head_size: int
    itemsize: int
    tokens: int
    frames: int
    window: int
    sink: int
    slots: tuple[int, ...]
    cross: tuple[tuple[int, int], ...]
    extra_tokens: int
    owned: int
    cap: int
    scratch_minimum: int = 0

    def page(self) -> int:
        """K and V of one frame in every layer, counted element by element."""
        return sum(self.tokens * self.heads * self.head_size * self.itemsize for _ in range(2 * self.layers))

    def scratch_blocks(self) -> int:
        """Pages that uncommitted forwards write, for each slot that some branch uses."""
        extra_pages = 0
        while extra_pages * self.tokens < self.extra_tokens:
            extra_pages += 1
        return len(set(self.slots)) * max(self.frames + extra_pages, self.scratch_minimum)

    def managed_blocks(self, sessions: int) -> int:
        """For each slot what the sessions keep and what one tick has in flight; the null page and a spare one."""
        kept = sum(self.sink + self.window for _ in range(sessions))
        return len(set(self.slots)) * (kept + self.frames) + 2

    def cross_bytes(self) -> int:
        """Every logical branch has its own caches, whatever slot it uses."""
        return sum(
            2 * tokens * heads * self.head_size * self.itemsize * self.layers
            for _ in self.slots
            for tokens, heads in self.cross
        )

    def required(self, sessions: int) -> int:
        """Bytes that so many sessions need."""
        return (
            (self.scratch_blocks() + self.managed_blocks(sessions)) * self.page()
            + sessions * self.cross_bytes()
            + sessions * self.owned
        )

    def budget(self, available: int, fraction: float) -> int:
        """What may be used: the share, but always one session."""
        return max(int(available * fraction), self.required(1))

    def capacity(self, available: int, fraction: float, wanted: int) -> int:
        """The most sessions that fit, found by trying."""
        budget, fit = self.budget(available, fraction), 1
        while fit < min(wanted, self.cap) and self.required(fit + 1) <= budget:
            fit += 1
        return fit

    def allocated_blocks(self, available: int, fraction: float, wanted: int) -> int:
        """Managed pages once everything else has its bytes."""
        sessions = self.capacity(available, fraction, wanted)
        others = self.scratch_blocks() * self.page() + sessions * (self.cross_bytes() + self.owned)
        return (self.budget(available, fraction) - others) // self.page()
