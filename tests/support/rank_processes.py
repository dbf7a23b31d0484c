"""Several ranks of one worker as processes of a test: each runs a function of this kind, and all return what it made.

    group = RankProcesses(2)
    first, second = group.run("support.rank_jobs:rollout", frames=24)
    group.end()

A process stays for further jobs. Jobs are called with `Ranks` and the given arguments.
"""

import multiprocessing as mp
import os
import traceback
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

from support.broker import free_port

PATIENCE_S = 100


class RankProcesses:
    """`degree` processes over gloo, one thread each; `limit_s` is what they may differ by within a request."""

    def __init__(self, degree: int, limit_s: float = 30) -> None:
        context = mp.get_context("spawn")
        port = free_port()
        self.degree = degree
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(degree):
            ours, theirs = context.Pipe()
            process = context.Process(target=_main, args=(rank, degree, port, theirs, limit_s), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, job: str, **arguments: Any) -> list[Any]:
        """What `module:function` returns on each rank; an error of one is raised here, in rank order."""
        for pipe in self._pipes:
            pipe.send((job, arguments))
        return [self._received(rank) for rank in range(len(self._pipes))]

    def _received(self, rank: int) -> Any:
        if not self._pipes[rank].poll(PATIENCE_S):
            raise AssertionError(f"rank {rank} does not answer")
        ok, value = self._pipes[rank].recv()
        if not ok:
            raise AssertionError(f"rank {rank}:\n{value}")
        return value

    def end(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(15)
            if process.is_alive():
                process.kill()
                process.join()


def _main(rank: int, degree: int, port: int, pipe: Connection, limit_s: float) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    import torch

    from gpu_worker.parallel.launch import Launch
    from gpu_worker.parallel.ranks import Ranks

    torch.set_num_threads(1)
    ranks = Ranks(Launch(rank, degree), torch.device("cpu"), limit_s=limit_s)
    while True:
        try:
            job, arguments = pipe.recv()
        except EOFError:
            break
        module, _, name = job.partition(":")
        try:
            answer = True, getattr(import_module(module), name)(ranks, **arguments)
        except BaseException:  # noqa: BLE001 - the test shows it
            answer = False, traceback.format_exc()
        pipe.send(answer)
    ranks.leave()
    os._exit(0)  # taking torch down in order takes seconds
