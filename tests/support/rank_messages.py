"""Messages of given lengths from rank 0 to the others."""

import random

from gpu_worker.parallel.ranks import Ranks


def exchange(ranks: Ranks, lengths: list[int]) -> list[tuple[int, int]]:
    """Length and broadcasts of each message, once it is certain that it arrived as it was."""
    found = []
    for length in lengths:
        expected, before = random.Random(length).randbytes(length), ranks.calls["broadcast"]
        if ranks.rank == 0:
            ranks.send(expected)
        else:
            assert ranks.receive() == expected
        found.append((length, ranks.calls["broadcast"] - before))
    return found
