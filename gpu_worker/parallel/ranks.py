"""How the ranks of one worker agree: a message of rank 0 to all, and after each request whether it went well everywhere.

Two process groups: one over gloo for these agreements, and one for tensors, which is made anew when ranks broke off in
the midst of a forward. A rank that fails while others wait for it in a collective lets them go by closing the second.
"""

from __future__ import annotations

import contextlib
import gc
import os
import time
import traceback
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Final, TypeVar

import orjson
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # not declared as exported
from torch.distributed.rendezvous import rendezvous

from contracts.errors import ConfigurationError, error_from_dict
from gpu_worker.engine_thread import as_failure
from gpu_worker.parallel.errors import RankMismatchError
from gpu_worker.parallel.launch import Launch
from gpu_worker.parallel.ulysses import Ulysses
from gpu_worker.parallel.watch import Watch, end_process

T = TypeVar("T")

MESSAGE_BYTES: Final = 16 << 10
"""What one broadcast carries; a longer message, one with an image for instance, takes a second."""

IDLE_LIMIT: Final = timedelta(days=365)
"""Ranks wait for the next request as long as it takes; the watch sees to those that die."""

FAILURES_PATIENCE_S: Final = 0.5
"""How long a rank that failed waits for the others to fail as well, before it lets those go that wait for it."""

LEAVE_PATIENCE: Final = timedelta(seconds=10)

_LENGTH_BYTES: Final = 8


class Ranks:
    """This process among the ranks of its worker.

    Args:
        launch: which one it is.
        device: where its tensors are: they cross by nccl from a GPU, else by gloo.
        limit_s: longest that ranks may differ within one request.

    Attributes:
        ulysses: exchanges tensors within forwards.
        calls: collectives of agreements begun so far, by name.
    """

    def __init__(self, launch: Launch, device: torch.device, *, limit_s: float) -> None:
        self.rank, self.degree = launch.rank, launch.degree
        self.device = device
        self._limit = timedelta(seconds=limit_s)
        self._backend = "nccl" if device.type == "cuda" else "gloo"
        if device.type == "cuda":
            torch.cuda.set_device(device)
        store, _, _ = next(rendezvous("env://", rank=self.rank, world_size=self.degree))
        prefix = f"worldline/{launch.attempt}"  # the launcher's store outlives those it starts
        self._store = PrefixStore(prefix, store)
        dist.init_process_group(
            "gloo", store=self._store, rank=self.rank, world_size=self.degree, timeout=IDLE_LIMIT
        )
        self.calls: Counter[str] = Counter()
        self.ulysses = Ulysses(self._new_group(), self.rank, self.degree)
        self._generation = 0
        self._let_go = -1
        self._request = 0
        self._noted: list[str] = []
        # A connection of its own: the other one may be waiting.
        own = TCPStore(store.host, store.port, is_master=False, wait_for_workers=False)
        self._flags = PrefixStore(prefix, own)
        self._watch = Watch(self._processes(), self._look)

    def _new_group(self) -> dist.ProcessGroup:
        group = dist.new_group(backend=self._backend, timeout=self._limit)
        assert isinstance(group, dist.ProcessGroup)
        return group

    def _processes(self) -> dict[int, str]:
        self._store.set(f"pid/{self.rank}", str(os.getpid()))
        others = [rank for rank in range(self.degree) if rank != self.rank]
        found = {int(self._store.get(f"pid/{rank}")): f"rank {rank}" for rank in others}
        return found | {os.getppid(): "the launcher"}

    # ------------------------------------------------------------------------------------------- messages

    def send(self, message: bytes) -> None:
        """Rank 0: every other rank receives it."""
        first = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8)
        framed = len(message).to_bytes(_LENGTH_BYTES, "little") + message
        whole = torch.frombuffer(bytearray(framed), dtype=torch.uint8)
        first[: len(whole)] = whole[:MESSAGE_BYTES]
        self._broadcast(first)
        if len(framed) > MESSAGE_BYTES:
            self._broadcast(whole[MESSAGE_BYTES:])
        self._begin_request()

    def receive(self) -> bytes:
        """The others: the next message of rank 0, however long it takes."""
        first = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8)
        self._broadcast(first)
        data = first.numpy().tobytes()
        length = int.from_bytes(data[:_LENGTH_BYTES], "little")
        missing = _LENGTH_BYTES + length - MESSAGE_BYTES
        if missing > 0:
            rest = torch.zeros(missing, dtype=torch.uint8)
            self._broadcast(rest)
            data += rest.numpy().tobytes()
        self._begin_request()
        return data[_LENGTH_BYTES : _LENGTH_BYTES + length]

    def _broadcast(self, buffer: torch.Tensor) -> None:
        self.calls["broadcast"] += 1
        self._finish(lambda: dist.broadcast(buffer, 0, async_op=True), None)

    def _begin_request(self) -> None:
        """Everybody has read what was noted two requests ago."""
        self._request += 1
        kept = f"failed/{self._request - 1}/"
        for key in [key for key in self._noted if not key.startswith(kept)]:
            self._store.delete_key(key)
            self._noted.remove(key)

    # ------------------------------------------------------------------------------------------- agreements

    def agree(self, error: BaseException | None, *, patient: bool = False) -> None:
        """Returns only if every rank calls it without an error.

        Args:
            error: what this rank failed with.
            patient: whether the others may take longer than the limit.

        Raises:
            `error`, if that was the first; else a typed error that says which rank failed, and with what.
        """
        if error is not None:
            self._note(error)
        exchanged = self.ulysses.calls.total()
        unusable = self.ulysses.group is None or self.ulysses.broken
        failed, closed, most, least = self._all_reduce(
            [error is not None, unusable, exchanged, -exchanged],
            dist.ReduceOp.MAX,
            None if patient else self._limit,
        )
        if closed or most != -least:
            self._join_again()
        if failed:
            raise self._first_failure(error)

    def together(self, call: Callable[[], T], what: str) -> T:
        """What `call` returns, once it has returned on every rank; ConfigurationError if it failed on another."""
        result: list[T] = []
        error: BaseException | None = None
        self._request += 1
        try:
            result.append(call())
        except Exception as failure:  # noqa: BLE001 - whatever it is, all have to know
            error = failure
        try:
            self.agree(error, patient=True)
        except Exception as failure:
            if failure is error:
                raise
            raise ConfigurationError(f"{what} failed: {failure}", field="ulysses_degree") from failure
        return result[0]

    def minimum(self, value: int) -> int:
        """The least of what the ranks say."""
        return self._all_reduce([value], dist.ReduceOp.MIN, None)[0]

    def check_equal(self, digest: bytes) -> None:
        """RankMismatchError unless all ranks have the same digest, of which seven bytes are looked at."""
        number = int.from_bytes(digest[:7], "little")
        most, least = self._all_reduce([number, -number], dist.ReduceOp.MAX, self._limit)
        if most != -least:
            raise RankMismatchError("the ranks of this worker hold different pages", field="block_tables")

    def leave(self) -> None:
        """Ends the group, once all others have come here as well, or have died."""
        self._watch.stop()
        with contextlib.suppress(RuntimeError):  # somebody has gone already
            work = dist.all_reduce(torch.zeros(1), async_op=True)
            assert work is not None
            work.wait(LEAVE_PATIENCE)
        self._drop_group()
        dist.destroy_process_group()

    def _all_reduce(
        self, values: list[int], op: dist.ReduceOp.RedOpType, limit: timedelta | None
    ) -> list[int]:
        self.calls["all_reduce"] += 1
        tensor = torch.tensor(values, dtype=torch.int64)
        self._finish(lambda: dist.all_reduce(tensor, op, async_op=True), limit)
        return [int(value) for value in tensor.tolist()]

    @staticmethod
    def _finish(begin: Callable[[], dist.Work | None], limit: timedelta | None) -> None:
        """Without this group nobody knows what the others do, so there is no going on."""
        try:
            work = begin()
            assert work is not None
            work.wait(IDLE_LIMIT if limit is None else limit)
        except RuntimeError as error:
            end_process(f"the other ranks do not answer ({_first_line(error)})")

    # ------------------------------------------------------------------------------------------- failures

    def _note(self, error: BaseException) -> None:
        """Says what went wrong here; if the others don't fail as well they may be waiting for this rank: they go free."""
        described = as_failure(error).to_dict()
        key = self._key(self.rank)
        self._store.set(key, orjson.dumps([self.ulysses.calls.total(), described]).decode())
        self._noted.append(key)
        missing = [self._key(rank) for rank in range(self.degree) if rank != self.rank]
        closed = f"closed/{self._generation}"
        deadline_s = time.monotonic() + FAILURES_PATIENCE_S
        while time.monotonic() < deadline_s and not self._store.check([closed]):
            if self._store.check(missing):
                return
            time.sleep(0.002)
        self._store.set(closed, "")
        _forget_frames(error)
        self._drop_group(waited_for=True)

    def _first_failure(self, own: BaseException | None) -> BaseException:
        """Those that others failed with in its wake had got further."""
        notes = []
        for rank in range(self.degree):
            if self._store.check([self._key(rank)]):
                exchanged, described = orjson.loads(self._store.get(self._key(rank)))
                notes.append((exchanged, rank, described))
        _, first, described = min(notes, key=lambda note: note[:2])
        if first == self.rank and own is not None:
            return own
        told = error_from_dict(described)
        told.message = f"rank {first}: {told.message}"
        return told

    def _key(self, rank: int) -> str:
        return f"failed/{self._request}/{rank}"

    def _look(self) -> None:
        """Of the watch: ranks that wait in nccl for one that has closed the group don't notice by themselves."""
        generation, group = self._generation, self.ulysses.group
        if self._backend == "gloo" or group is None or self._let_go == generation:
            return
        try:
            closed = self._flags.check([f"closed/{generation}"])
        except RuntimeError as error:
            end_process(f"the launcher's store does not answer ({_first_line(error)})")
        if closed:
            self._let_go = generation
            group.abort()

    def _drop_group(self, *, waited_for: bool = False) -> None:
        """Closes the group for tensors; where others may wait in it, or this device itself, without waiting."""
        group, self.ulysses.group = self.ulysses.group, None
        if group is None:
            return
        if waited_for and self._backend == "nccl" and self._let_go != self._generation:
            group.abort()
        dist.destroy_process_group(group)
        del group
        gc.collect()  # its connections close with the last reference: only then do the others stop waiting

    def _join_again(self) -> None:
        self._drop_group(waited_for=True)
        self._generation += 1
        self.ulysses.calls.clear()
        self.ulysses.broken = False
        self.ulysses.group = self._new_group()


def _first_line(error: Exception) -> str:
    return f"{str(error).partition(chr(10))[0]:.200}"


def _forget_frames(error: BaseException | None) -> None:
    """Calls that failed in a collective still hold the group, and it would stay open."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
