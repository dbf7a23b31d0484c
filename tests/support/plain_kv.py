"""A paged KV timeline written down with plain lists: what must stay, what must be seen. Imports nothing of ours."""


class PlainTimeline:
    """Frames are their absolute numbers.

    Args:
        window: recent frames kept.
        sink: leading frames kept.
        reset_at_boundary: keep the sink only.
    """

    def __init__(self, window: int, sink: int, reset_at_boundary: bool) -> None:
        self.window = window
        self.sink = sink
        self.reset_at_boundary = reset_at_boundary
        self.committed = 0
        self.kept: list[int] = []

    def visible_with(self, count: int) -> list[int]:
        """What a forward over `count` frames sees, its own included."""
        frames = [*self.kept, *range(self.committed, self.committed + count)]
        if len(frames) <= self.sink + self.window:
            return frames
        return frames[: self.sink] + frames[-self.window :]

    def commit(self, count: int) -> None:
        """`count` frames stay."""
        for _ in range(count):
            self.kept.append(self.committed)
            self.committed += 1
            recent = [] if self.reset_at_boundary else self.kept[self.sink :][-self.window :]
            self.kept = self.kept[: self.sink] + recent

    def reset(self) -> None:
        """Back to the start."""
        self.committed = 0
        self.kept = []
