"""The script over an index: what repairs one must never undo what a host is just writing."""

from __future__ import annotations

from contracts.scripts import ScriptRunner


class IndexScripts(ScriptRunner):
    """Scripts on the slot of one index."""

    async def drop(self, index: str, member: str, score: float) -> bool:
        """Takes `member` out if its score is still `score`; whether it did."""
        reply = await self.run("index_drop", [index], [member, repr(score)])
        return bool(reply[0] == "DROPPED")
