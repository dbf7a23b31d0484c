"""Drives a world from outside: reads a walk and adds each step to the session's events. Needs redis-py, nothing else.

    python producer.py --session my-world

Time starts with the session's first chunk. With --lockstep there is no clock: for each chunk number on stdin, the
steps that fall into that chunk are added, and the number is printed back.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import redis

HERE = Path(__file__).parent
TRACK, SCHEMA = "camera", "lingbot.camera_actions.v1"


def read_events(options: argparse.Namespace) -> list[tuple[int, dict[str, str]]]:
    """(time, fields of the entry) of every event, in order; the ids are the same with and without the keys."""
    steps = [json.loads(line) for line in options.walk.read_text().splitlines()]
    if options.prompt:
        steps.append({"t_ms": options.prompt_at_ms, "prompt": options.prompt})
    steps.sort(key=lambda step: step["t_ms"])
    events = [(step["t_ms"], {"event_id": str(number), **fields(step)}) for number, step in enumerate(steps)]
    return [event for event in events if "prompt" in event[1] or not options.no_keys]


def fields(step: dict) -> dict[str, str]:
    if "prompt" in step:
        return {"prompt": step["prompt"]}
    held = {"mode": "state", "transitions": [{"actions": step["actions"], "client_ts_ms": step["t_ms"]}]}
    return {"controls": json.dumps([{"track": TRACK, "schema": SCHEMA, "data": held}])}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--session", required=True)
    parser.add_argument("--url", default="redis://127.0.0.1:6379/0")
    parser.add_argument("--prefix", default="wl")
    parser.add_argument("--walk", type=Path, default=HERE / "walk.jsonl")
    parser.add_argument("--prompt", help="switch to this prompt on the way")
    parser.add_argument("--prompt-at-ms", type=int, default=1250)
    parser.add_argument("--no-keys", action="store_true", help="leave the key events out")
    parser.add_argument("--lockstep", action="store_true")
    parser.add_argument("--pace-ms", type=int, default=200, help="length of a chunk, for --lockstep")
    options = parser.parse_args()

    events = read_events(options)
    broker = redis.Redis.from_url(options.url, decode_responses=True)
    base = f"{options.prefix}:{{{options.session}}}"

    def push(entry: dict[str, str]) -> None:
        if broker.xadd(f"{base}:events", entry, nomkstream=True) is None:
            sys.exit(f"session {options.session} takes no events")

    broker.ping()
    print("ready", flush=True)
    if options.lockstep:
        for line in sys.stdin:
            for t_ms, entry in events:
                if 1 + t_ms // options.pace_ms == int(line):  # time starts with chunk 0
                    push(entry)
            print(line.strip(), flush=True)
        return
    broker.xread({f"{base}:chunks": "0"}, count=1, block=60_000)  # answers at the first chunk
    started = time.monotonic()
    for t_ms, entry in events:
        time.sleep(max(0.0, started + t_ms / 1000 - time.monotonic()))
        push(entry)


if __name__ == "__main__":
    main()
