"""A worker that a test scripts: it reads requests and answers as it is told, without an engine.

It shares nothing with `gpu_worker`; it speaks the wire format only.
"""

import asyncio
import json
import secrets
from collections.abc import Callable
from typing import Any

import redis.asyncio

Reply = dict[str, Any]
Script = Callable[[dict[str, str]], Reply | None]


class ScriptedWorker:
    """Announces itself under a name and answers each request.

    `on_request` may return the reply's `output` or `error` part to replace the usual one, or None for the usual one;
    `hold` keeps requests waiting until it is set again. `requests` is everything that arrived.
    """

    def __init__(self, url: str, *, name: str = "w0", model: str = "scripted", capacity: int = 64) -> None:
        self.client = redis.asyncio.Redis.from_url(url)
        self.name, self.model, self.capacity = name, model, capacity
        self.incarnation = secrets.token_hex(4)
        self.on_request: Script | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.requests: list[dict[str, str]] = []
        self.cursor = "0-0"
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "ScriptedWorker":
        await self.announce()
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()
        await self.client.aclose()

    async def announce(self) -> None:
        seconds, micros = await self.client.time()
        fields = {
            "incarnation": self.incarnation,
            "model": self.model,
            "capacity": self.capacity,
            "resident": 0,
        }
        await self.client.hset(f"wl:{{w:{self.name}}}:info", mapping=fields)
        await self.client.zadd("wl:workers", {self.name: seconds * 1000 + micros // 1000})

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None

    def kinds(self) -> list[str]:
        """The kinds of all requests so far."""
        return [request["kind"] for request in self.requests]

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
            await self.answer(request)
            await self.client.xdel(stream, entry_id)

    async def answer(self, request: dict[str, str], **changes: Any) -> None:
        """Sends the reply to one request; `changes` replace fields of it."""
        part = self.on_request(request) if self.on_request else None
        reply: Reply = {
            "session_id": session_of(request),
            "request_id": request["request_id"],
            "fence": int(request["fence"]),
            "life": request["life"],
            "incarnation": self.incarnation,
            "queued_ms": 1,
            "executed_ms": 2,
        }
        if part is not None:
            reply |= part
        elif request["kind"] == "tick":
            reply["output"] = output_of(json.loads(request["tick"]))
        reply |= changes
        await self.client.xadd(request["reply_to"], {"reply": json.dumps(reply)})


def session_of(request: dict[str, str]) -> str:
    """The session that a request is about."""
    return request["session_id"] if "session_id" in request else json.loads(request["tick"])["session_id"]


def output_of(tick: dict[str, Any], **metadata: Any) -> Reply:
    """The output of a tick; `metadata` replaces fields of what must come back."""
    body = {
        name: tick[name] for name in ("session_id", "request_id", "chunk_index", "applied_event_ids")
    } | metadata
    return {
        "metadata": {"ar_diffusion": body},
        "payload": f"memory://{tick['request_id']}",
        "content_type": "application/octet-stream",
        "sha256": "0" * 64,
        "bytes": 1,
    }


def failing(code: str = "model_error", message: str = "boom") -> Script:
    """A script that answers every tick with an error."""

    def script(request: dict[str, str]) -> Reply | None:
        if request["kind"] != "tick":
            return None
        return {"error": {"code": code, "message": message, "field": None, "retryable": False}}

    return script
