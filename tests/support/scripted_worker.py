"""A worker that a test scripts: it reads requests and answers as it is told, without an engine.

It shares nothing with `gpu_worker`; it speaks the wire format only. As every worker it drops what comes under a lower
fence than it has seen, and answers a request that has run from its record.
"""

import asyncio
import json
import secrets
from collections import Counter
from collections.abc import Callable
from typing import Any

import redis.asyncio

Reply = dict[str, Any]
Script = Callable[[dict[str, str]], Reply | None]

SILENCE: Reply = {"silence": True}
"""What a script returns where the worker is to send nothing."""


class ScriptedWorker:
    """Announces itself under a name and answers each request.

    `on_request` may return the reply's `output` or `error` part to replace the usual one, or None for the usual one;
    `gate` keeps requests waiting while it is cleared. `requests` is everything that arrived, `runs` how often each
    request id was carried out.
    """

    def __init__(self, url: str, *, name: str = "w0", model: str = "scripted", capacity: int = 64) -> None:
        self.client = redis.asyncio.Redis.from_url(url)
        self.name, self.model, self.capacity = name, model, capacity
        self.incarnation = secrets.token_hex(4)
        self.on_request: Script | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.requests: list[dict[str, str]] = []
        self.runs: Counter[str] = Counter()
        self.cursor = "0-0"
        self._records: dict[str, Reply] = {}
        self._fences: dict[str, int] = {}
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "ScriptedWorker":
        await self.announce()
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()
        await self.client.aclose()

    async def announce(self, **fields: Any) -> None:
        """Writes its info and enters the index of workers; `fields` are added to the info."""
        usual = {
            "incarnation": self.incarnation,
            "model": self.model,
            "capacity": self.capacity,
            "resident": 0,
        }
        await self.client.hset(f"wl:{{w:{self.name}}}:info", mapping=usual | fields)
        await self.client.zadd("wl:workers", {self.name: await self._now_ms()})

    async def vanish(self, silent_for_ms: int = 3_600_000) -> None:
        """Stops, as if killed and silent for so long: its info is gone, its place in the index is old."""
        await self.stop()
        await self.client.delete(f"wl:{{w:{self.name}}}:info")
        await self.client.zadd("wl:workers", {self.name: await self._now_ms() - silent_for_ms})

    def start(self) -> None:
        """Begins to read, with what lies in the stream."""
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        if self._task is not None:
            while not self._task.done():
                self._task.cancel()  # a read that ends in this moment swallows it
                await asyncio.wait([self._task], timeout=1)
            self._task = None

    def kinds(self) -> list[str]:
        """The kinds of all requests so far."""
        return [request["kind"] for request in self.requests]

    def ticks(self) -> list[dict[str, Any]]:
        """The ticks of all requests so far, decoded."""
        return [json.loads(request["tick"]) for request in self.requests if request["kind"] == "tick"]

    async def arrived(self, count: int, timeout_s: float = 10) -> dict[str, str]:
        """Waits until so many requests have arrived; returns the last of them."""
        async with asyncio.timeout(timeout_s):
            while len(self.requests) < count:
                await asyncio.sleep(0.005)
        return self.requests[count - 1]

    async def _run(self) -> None:
        stream = f"wl:{{w:{self.name}}}:requests"
        while True:
            reply = await self.client.xread({stream: self.cursor}, count=1, block=500)
            if not reply:
                continue
            entry_id, raw = reply[0][1][0]
            self.cursor = entry_id.decode()
            request = {name.decode(): value.decode() for name, value in raw.items()}
            self.requests.append(request)
            await self.gate.wait()
            await self._serve(request)
            await self.client.xdel(stream, entry_id)

    async def _serve(self, request: dict[str, str]) -> None:
        session_id, fence, request_id = session_of(request), int(request["fence"]), request["request_id"]
        if fence < self._fences.get(session_id, 0):
            return
        self._fences[session_id] = fence
        if request_id not in self._records:
            self.runs[request_id] += 1
            self._records[request_id] = self.reply_to(request)
        reply = self._records[request_id]
        if isinstance(reply.get("error"), dict) and reply["error"]["code"] == "expired":  # it has not run
            del self._records[request_id]
            self.runs[request_id] -= 1
        if "silence" not in reply:
            await self.send(request, **reply)

    def reply_to(self, request: dict[str, str]) -> Reply:
        """What it answers to a request, but for what each delivery has of its own."""
        part = self.on_request(request) if self.on_request else None
        if part is None:
            part = {"output": output_of(json.loads(request["tick"]))} if request["kind"] == "tick" else {}
        return part

    async def send(self, request: dict[str, str], **parts: Any) -> None:
        """Sends a reply to a request: the usual envelope with `parts` in it."""
        reply = {
            "session_id": session_of(request),
            "request_id": request["request_id"],
            "fence": int(request["fence"]),
            "life": request["life"],
            "incarnation": self.incarnation,
            "queued_ms": 1,
            "executed_ms": 2,
        } | parts
        await self.client.xadd(request["reply_to"], {"reply": json.dumps(reply)})

    async def tell(
        self, kind: str, session_id: str, inbox: str, *, life: str, incarnation: str = "", worker: str = ""
    ) -> bytes:
        """Adds a notice about a session to an inbox; returns the entry's id."""
        notice = {
            "kind": kind,
            "session_id": session_id,
            "worker": worker or self.name,
            "life": life,
            "incarnation": incarnation or self.incarnation,
            "message": "told by a test",
        }
        return await self.client.xadd(inbox, {"notice": json.dumps(notice)})

    async def _now_ms(self) -> int:
        seconds, micros = await self.client.time()
        return int(seconds) * 1000 + int(micros) // 1000


def session_of(request: dict[str, str]) -> str:
    """The session that a request is about."""
    return request["session_id"] if "session_id" in request else json.loads(request["tick"])["session_id"]


def output_of(tick: dict[str, Any], **metadata: Any) -> Reply:
    """The output of a tick; `metadata` replaces fields of what must come back."""
    names = ("session_id", "request_id", "chunk_index", "applied_event_ids")
    return {
        "metadata": {"ar_diffusion": {name: tick[name] for name in names} | metadata},
        "payload": f"memory://{tick['request_id']}",
        "content_type": "application/octet-stream",
        "sha256": "0" * 64,
        "bytes": 1,
    }


def failing(
    code: str = "model_error", message: str = "boom", *, kind: str = "tick", times: int = 1_000_000
) -> Script:
    """A script that answers the next `times` requests of a kind with an error."""
    left = [times]

    def script(request: dict[str, str]) -> Reply | None:
        if request["kind"] != kind or not left[0]:
            return None
        left[0] -= 1
        return {"error": {"code": code, "message": message, "field": None, "retryable": False}}

    return script
