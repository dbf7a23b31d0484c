"""What must hold on the broker whenever nothing is going on. Written against the wire format, sharing no code with it.

    await check_invariants(client)

Waits until the inboxes are empty, then looks at every key and fails with the list of everything that is wrong.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import redis.asyncio

STATUSES = {"ACTIVE", "FAILED", "CLOSING", "CLOSED", "CLEANUP_FAILED"}
MOVES = {
    ("created", "", "ACTIVE"),
    ("created", "CLOSED", "ACTIVE"),
    ("tick_failed", "ACTIVE", "FAILED"),
    ("worker_lost", "ACTIVE", "FAILED"),
    ("evicted", "ACTIVE", "FAILED"),
    ("reset_succeeded", "ACTIVE", "ACTIVE"),
    ("reset_succeeded", "FAILED", "ACTIVE"),
    ("reset_failed", "ACTIVE", "FAILED"),
    ("reset_failed", "FAILED", "FAILED"),
    ("close_requested", "ACTIVE", "CLOSING"),
    ("close_requested", "FAILED", "CLOSING"),
    ("close_requested", "CLEANUP_FAILED", "CLOSING"),
    ("cleanup_succeeded", "CLOSING", "CLOSED"),
    ("cleanup_failed", "CLOSING", "CLEANUP_FAILED"),
}
TAKEN_ELSEWHERE = {"duplicate", "stale"}
"""Reasons of a rejected entry whose id another event carries."""


async def check_invariants(
    client: redis.asyncio.Redis, *, settle_s: float = 5.0, crashed: bool = False
) -> None:
    """Fails with everything that is wrong.

    Where a host has `crashed`, an index on another slot may name a session too many until it is reconciled.
    """
    await _settle(client, settle_s)
    wrong = await problems(client, crashed=crashed)
    assert not wrong, "broken invariants:\n" + "\n".join(wrong)


async def problems(client: redis.asyncio.Redis, *, crashed: bool = False) -> list[str]:
    """Everything that is wrong, a line each."""
    check = _Check(client, crashed)
    await check.load()
    for session_id in sorted(check.states):
        await check.session(session_id)
    await check.indexes()
    await check.reservations()
    await check.partitions()
    return check.wrong


async def _settle(client: redis.asyncio.Redis, settle_s: float) -> None:
    """Outcomes are durable before the inbox entries are deleted, so the deletion may be a moment behind."""
    deadline = asyncio.get_running_loop().time() + settle_s
    while asyncio.get_running_loop().time() < deadline:
        lengths = [await client.xlen(key) for key in await _keys(client, "wl:{p*}:inbox")]
        if not any(lengths):
            return
        await asyncio.sleep(0.02)


async def _keys(client: redis.asyncio.Redis, pattern: str) -> list[str]:
    return sorted([key.decode() async for key in client.scan_iter(pattern, count=1000)])


def _text(raw: dict[bytes, bytes]) -> dict[str, str]:
    return {name.decode(): value.decode(errors="replace") for name, value in raw.items()}


@dataclass
class _Check:
    client: redis.asyncio.Redis
    crashed: bool
    states: dict[str, dict[str, str]] = field(default_factory=dict)
    tombstones: set[str] = field(default_factory=set)
    wrong: list[str] = field(default_factory=list)

    async def load(self) -> None:
        for key in await _keys(self.client, "wl:{*}:state"):
            self.states[key[len("wl:{") : -len("}:state")]] = _text(await self.client.hgetall(key))
        self.tombstones = {name.decode() for name in await self.client.zrange("wl:tombstones", 0, -1)}

    def say(self, holds: bool, what: str) -> None:
        if not holds:
            self.wrong.append(what)

    async def stream(self, key: str) -> list[tuple[str, dict[str, str]]]:
        return [(entry_id.decode(), _text(fields)) for entry_id, fields in await self.client.xrange(key)]

    # -- one session -------------------------------------------------------------------------------------------

    async def session(self, sid: str) -> None:
        state = self.states[sid]
        status = state["status"]
        self.say(status in STATUSES, f"{sid}: status {status}")
        self.say("inflight" not in state, f"{sid}: in flight while idle: {state.get('inflight')}")
        failed = {"ACTIVE": False, "FAILED": True}.get(status)
        code = state.get("failure_code")
        self.say(failed in (None, code is not None), f"{sid}: {status} with failure_code {code}")
        self.say(
            "cleanup_error" in state or status != "CLEANUP_FAILED",
            f"{sid}: CLEANUP_FAILED without cleanup_error",
        )
        self.say("pace_ms" not in state or status == "ACTIVE", f"{sid}: {status} runs free")
        expires = await self.client.pttl(f"wl:{{{sid}}}:state") > 0
        self.say(expires == (status == "CLOSED"), f"{sid}: {status}, but expires is {expires}")
        rejected = await self.stream(f"wl:{{{sid}}}:rejected")
        totals = json.loads(state["rejected_total"]) or {}
        counted = Counter(entry["reason"] for _, entry in rejected)
        self.say(
            all(totals.get(reason, 0) >= n for reason, n in counted.items()), f"{sid}: {counted} vs {totals}"
        )
        self.say(
            sum(totals.values()) == len(rejected) or len(rejected) == 10_000,
            f"{sid}: totals {totals}, {len(rejected)}",
        )
        await self.ids(sid, state)
        await self.chunks(sid, state, rejected)
        await self.answers(sid)
        await self.history(sid, status)

    async def ids(self, sid: str, state: dict[str, str]) -> None:
        """Ids above the floor belong to pending entries; at or below it at most the limit is remembered."""
        floor, limit = int(state["event_floor"]), int(state["max_pending_events"])
        ids = [int(member) for member in await self.client.zrange(f"wl:{{{sid}}}:ids", 0, -1)]
        pending = [entry.get("event_id") for _, entry in await self.stream(f"wl:{{{sid}}}:events")]
        lost = [i for i in ids if i > floor and str(i) not in pending]
        self.say(not lost, f"{sid}: ids {lost} are above the floor {floor} and not in events")
        self.say(sum(i <= floor for i in ids) <= limit, f"{sid}: remembers more than {limit} ids")
        self.say(state["status"] != "CLOSED" or not pending, f"{sid}: CLOSED with pending events")

    async def chunks(
        self, sid: str, state: dict[str, str], rejected: list[tuple[str, dict[str, str]]]
    ) -> None:
        """Contiguous from 0 in each life, ids applied in order and once, and never both applied and dropped."""
        chunks = [entry for _, entry in await self.stream(f"wl:{{{sid}}}:chunks")]
        expected: dict[str, int] = {}
        for chunk in chunks if len(chunks) < 1000 else ():
            index = int(chunk["chunk_index"])
            self.say(
                index == expected.get(chunk["life"], 0),
                f"{sid}: chunk {index} of {chunk['life']} out of order",
            )
            expected[chunk["life"]] = index + 1
        last = [int(chunk["chunk_index"]) for chunk in chunks if chunk["life"] == state["life"]][-1:]
        self.say(
            int(state["chunk_index"]) == (last[0] + 1 if last else 0),
            f"{sid}: chunk_index {state['chunk_index']}, {last}",
        )
        applied = [i for chunk in chunks for i in json.loads(chunk["applied_event_ids"])]
        self.say(applied == sorted(set(applied)), f"{sid}: applied {applied}")
        dropped = {e["event_id"] for _, e in rejected if e["reason"] not in TAKEN_ELSEWHERE}
        both = [i for i in applied if str(i) in dropped and not self._reused(rejected, str(i))]
        self.say(not both, f"{sid}: applied and rejected: {both}")

    @staticmethod
    def _reused(rejected: Iterable[tuple[str, dict[str, str]]], event_id: str) -> bool:
        """An id whose entry was refused may come again: only what an accepted event says counts."""
        reasons = {entry["reason"] for _, entry in rejected if entry["event_id"] == event_id}
        return reasons <= TAKEN_ELSEWHERE | {"invalid", "invalid_control", "queue_full", "not_active"}

    async def answers(self, sid: str) -> None:
        """Every answer of a command is the same answer, and it is remembered."""
        known = _text(await self.client.hgetall(f"wl:{{{sid}}}:answered"))
        told: dict[str, set[str]] = {}
        for _, entry in await self.stream(f"wl:{{{sid}}}:answers"):
            told.setdefault(json.loads(entry["answer"])["command_id"], set()).add(entry["answer"])
        self.say(
            all(len(texts) == 1 for texts in told.values()), f"{sid}: two answers to one command: {told}"
        )
        self.say(set(told) == set(known), f"{sid}: answers {sorted(set(told) ^ set(known))} not in both")
        self.say(
            all(texts == {known.get(c)} for c, texts in told.items()), f"{sid}: answers differ from answered"
        )

    async def history(self, sid: str, status: str) -> None:
        moves = [entry for _, entry in await self.stream(f"wl:{{{sid}}}:history")]
        for move in moves:
            step = (move["trigger"], move["from"], move["to"])
            self.say(step in MOVES, f"{sid}: illegal transition {step}")
        ends = [move["to"] for move in moves[:-1]]
        self.say(
            ends == [move["from"] for move in moves[1:]] or "" in {m["from"] for m in moves[1:]},
            f"{sid}: gap: {moves}",
        )
        self.say(bool(moves) and moves[-1]["to"] == status, f"{sid}: {status} is not the end of its history")

    # -- what lies on other slots ------------------------------------------------------------------------------

    async def indexes(self) -> None:
        """Each session is in the index of its status and in no other; a tombstone is in `tombstones`."""
        for status in sorted(STATUSES):
            members = {name.decode() for name in await self.client.zrange(f"wl:sessions:{status}", 0, -1)}
            states = {sid for sid, state in self.states.items() if state["status"] == status}
            self.say(states <= members, f"not in the index {status}: {sorted(states - members)}")
            extra = (
                members
                - states
                - ({sid for sid in members if sid not in self.states} if status == "CLOSED" else set())
            )
            self.say(self.crashed or not extra, f"wrongly in the index {status}: {sorted(extra)}")
        ending = {
            sid for sid, state in self.states.items() if state["status"] in {"CLOSING", "CLEANUP_FAILED"}
        }
        self.say(
            self.tombstones == ending or (self.crashed and self.tombstones > ending),
            f"tombstones {sorted(self.tombstones)}, should be {sorted(ending)}",
        )

    async def reservations(self) -> None:
        """What is placed has its room, under its present life; what is closed has none."""
        for key in await _keys(self.client, "wl:{w:*}:sessions"):
            worker = key[len("wl:{w:") : -len("}:sessions")]
            for name, text in (await self.client.hgetall(key)).items():
                state = self.states.get(name.decode(), {})
                life, status = json.loads(text)["life"], state.get("status")
                fits = state.get("worker") == worker and life == state.get("life") and status != "CLOSED"
                flying: Any = json.loads(state.get("inflight", "{}"))
                self.say(
                    fits or life == flying.get("life"),
                    f"{worker} has room for {name.decode()} in {life}: {state}",
                )
        for sid, state in self.states.items():
            if state["status"] in {"ACTIVE", "CLEANUP_FAILED"}:
                there = await self.client.hexists(f"wl:{{w:{state['worker']}}}:sessions", sid)
                lost = state["status"] == "CLEANUP_FAILED" and "failure_code" in state
                self.say(bool(there) or lost, f"{sid}: {state['status']} without room on {state['worker']}")

    async def partitions(self) -> None:
        """Nothing is unfinished, and who runs free is known to the next owner."""
        for key in await _keys(self.client, "wl:{p*}:inbox"):
            left = await self.stream(key)
            self.say(not left, f"{key}: unfinished: {left[:5]}")
        for key in await _keys(self.client, "wl:{p*}:attempts"):
            self.say(not await self.client.hlen(key), f"{key}: not empty")
        live: set[str] = set()
        for key in await _keys(self.client, "wl:{p*}:live"):
            live |= {name.decode() for name in await self.client.smembers(key)}
        wanted = {sid for sid, state in self.states.items() if _is_live(state)}
        self.say(live == wanted, f"live {sorted(live)}, should be {sorted(wanted)}")
        for key in await _keys(self.client, "wl:{w:*}:requests"):
            dead = not await self.client.exists(key.replace("requests", "info"))
            self.say(dead or not await self.client.xlen(key), f"{key}: requests left")


def _is_live(state: dict[str, str]) -> bool:
    timed = int(state.get("presence_ms", 0)) > 0 or int(state.get("idle_ms", 0)) > 0
    return state["status"] != "CLOSED" and ("pace_ms" in state or timed)
