"""The scripts of a partition: its lease, its inbox and the set of sessions that its next owner adopts at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from contracts.errors import OwnershipLostError
from contracts.scripts import Argument, ScriptRunner


@dataclass(frozen=True, slots=True)
class Lease:
    """A partition that is owned: by whom, under which epoch, until when (broker time)."""

    owner: str
    epoch: int
    expires_at_ms: int


class PartitionScripts(ScriptRunner):
    """Scripts on the slot of one partition; all but claim and renew raise OwnershipLostError under an old epoch."""

    async def claim(self, partition: int, owner: str, lease_ms: int) -> Lease | None:
        """The lease, or None while another owner holds it."""
        reply = await self.run("lease_claim", [self.keys.partition(partition).lease], [owner, lease_ms])
        return Lease(owner, int(reply[1]), int(reply[2])) if reply[0] == "CLAIMED" else None

    async def renew(self, partition: int, owner: str, epoch: int, lease_ms: int) -> bool:
        """Whether the lease was still ours; a late renewal is refused."""
        reply = await self.run(
            "lease_renew", [self.keys.partition(partition).lease], [owner, epoch, lease_ms]
        )
        return bool(reply[0] == "RENEWED")

    async def release(self, partition: int, owner: str, epoch: int) -> bool:
        """Hands the partition over at once."""
        reply = await self.run("lease_release", [self.keys.partition(partition).lease], [owner, epoch])
        return bool(reply[0] == "RELEASED")

    async def inbox_done(self, partition: int, epoch: int, entry_ids: Sequence[str]) -> int:
        """Deletes inbox entries whose outcome is durable."""
        k = self.keys.partition(partition)
        reply = await self._owned("inbox_done", [k.lease, k.inbox, k.attempts], [epoch, *entry_ids])
        return int(reply[1])

    async def inbox_attempt(self, partition: int, epoch: int, entry_id: str) -> int:
        """Counts that a claim found this entry unfinished; returns how often that was."""
        k = self.keys.partition(partition)
        reply = await self._owned("inbox_attempt", [k.lease, k.attempts], [epoch, entry_id])
        return int(reply[1])

    async def set_live(self, partition: int, epoch: int, session_id: str, live: bool) -> None:
        """Adds the session to `live`, or takes it out."""
        k = self.keys.partition(partition)
        await self._owned("live_set", [k.lease, k.live], [epoch, session_id, int(live)])

    async def _owned(self, name: str, keys: Sequence[str], args: Sequence[Argument]) -> list[Any]:
        reply = await self.run(name, keys, args)
        if reply[0] == "FENCED":
            raise OwnershipLostError(f"{name} was refused: the partition has another owner")
        return reply
