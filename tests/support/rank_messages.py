"""Messages from rank 0 to the others: of given lengths, and after given waits."""

import random
import time

import torch

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


def linger(ranks: Ranks, pause_s: float) -> float:
    """What ranks exchange after waits for a request, and for one that is slow to start."""
    if ranks.rank == 0:
        time.sleep(pause_s)
        ranks.send(b"at last")
    else:
        assert ranks.receive() == b"at last"
        time.sleep(pause_s)
    ranks.agree(None, patient=True)
    return float(ranks.ulysses.gather(torch.ones(1, 1, 1)).sum())
