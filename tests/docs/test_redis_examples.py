"""Each `redis-cli` line of the page on the broker does what the page says."""

import json
import re
import shlex
from pathlib import Path

from redis.asyncio import Redis

from support.broker import RealBroker
from support.hosting import Caller, running_host
from support.scripted_worker import ScriptedWorker

PAGE = Path(__file__).parents[2] / "docs" / "redis.md"


def _lines() -> list[list[str]]:
    blocks = re.findall(r"```\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines() if line.startswith("redis-cli ")]
    return [shlex.split(line, comments=True)[1:] for line in lines]


async def test_the_examples_drive_a_world_from_creation_to_close(broker: RealBroker, real: Redis) -> None:
    replies = {}
    caller = Caller(real)
    async with ScriptedWorker(broker.url, name="gpu-0", model="reference"), running_host(broker.url):
        for words in _lines():
            replies[" ".join(words)] = await real.execute_command(*words)
            sent = re.search(r'"command_id":"(\w+)"', words[-1])
            if sent:
                answer = await caller.answer_to(sent[1])
                assert answer["ok"], (words, answer)
        chunks = await caller.chunks()
        applied = [event_id for chunk in chunks for event_id in json.loads(chunk["applied_event_ids"])]
        state = await caller.state()

    assert state["status"] == "CLOSED"
    assert applied == [1, 2]
    assert replies["CLUSTER KEYSLOT world-1"] % 8 == 0
    assert replies["HGET wl:config partitions"] == b"8"
    assert replies["HGETALL wl:{w:gpu-0}:info"]
