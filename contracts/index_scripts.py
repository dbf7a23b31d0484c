"""The scripts over an index: what repairs one must never undo what a host is just writing."""

from __future__ import annotations

from contracts.scripts import ScriptRunner


class IndexScripts(ScriptRunner):
    """Scripts on the slot of one index."""

    async def add(self, index: str, member: str, score: int) -> None:
        """Enters `member`, or gives it another score; also while the broker is out of memory."""
        await self.run("index_add", [index], [member, score])

    async def drop(self, index: str, member: str, score: float) -> bool:
        """Takes `member` out if its score is still `score`; whether it did."""
        reply = await self.run("index_drop", [index], [member, repr(score)])
        return bool(reply[0] == "DROPPED")
