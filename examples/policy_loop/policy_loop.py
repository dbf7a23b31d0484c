"""Closes the loop: the arm is seen, the policy answers, its actions are applied, and so on.

python policy_loop.py                      with a tiny checkpoint of random weights, written on the way
python policy_loop.py --checkpoint DIR     with one of your own, for the embodiment of this arm
"""

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from arm import Arm
from tiny_checkpoint import write

from actors.client import SessionClient
from contracts.dreamzero import observation_control
from contracts.events import ARDiffusionSessionEvent
from contracts.payloads import decode_payload

LANGUAGE = "reach for the green ball"
PICTURES_LIVE_MS = 60_000


def first_url(stack: subprocess.Popen[str]) -> str:
    """Of the broker, once everything is ready."""
    url = ""
    for line in stack.stdout or ():
        if line.startswith("REDIS_URL="):
            url = line.strip().removeprefix("REDIS_URL=")
        if line.strip() == "ready":
            return url
    sys.exit("worldline dev has ended")


@contextmanager
def running(checkpoint: Path, folder: Path) -> Iterator[str]:
    """Broker, host, worker and janitor over a checkpoint; the broker's URL."""
    command = [sys.executable, "-m", "actors.cli", "dev", "--model", "dreamzero", "--data-dir", str(folder)]
    env = os.environ | {"WORLDLINE_CHECKPOINT": str(checkpoint), "WORLDLINE_DEVICE_MEMORY": "1GiB"}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as stack:
        try:
            yield first_url(stack)
        finally:
            stack.terminate()


async def drive(arm: Arm, url: str, ticks: int) -> None:
    """So many times: pictures and joints in, actions out, applied."""
    async with SessionClient("arm", url) as session:
        await session.create(
            model="dreamzero", reducer="dreamzero-observation", params={"num_inference_steps": 4}
        )
        for tick in range(ticks):
            images = {}
            for view, picture in arm.cameras().items():
                key = f"policy-loop:{tick}:{view}"
                await session.broker.commands.set(key, picture, px=PICTURES_LIVE_MS)
                images[view] = f"redis:{key}"
            seen = observation_control(images, arm.state(), LANGUAGE)
            await session.accept_event(ARDiffusionSessionEvent(tick, controls=(seen,)))
            chunk = await session.next_chunk()
            actions = decode_payload(await session.read(chunk.payload))["actions"]
            for action in actions:
                arm.step(action)
            print(f"tick {tick:2}  {len(actions)} actions in {chunk.executed_ms} ms  {arm.angles.round(2)}")
        await session.close("done")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--ticks", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("joints.png"))
    options = parser.parse_args()
    arm = Arm()
    with tempfile.TemporaryDirectory() as name:
        folder, checkpoint = Path(name), options.checkpoint
        if checkpoint is None:
            checkpoint = write(folder / "checkpoint")
            print("the weights are random: the arm moves, and means nothing by it")
        with running(checkpoint, folder / "data") as url:
            asyncio.run(drive(arm, url, options.ticks))
    arm.plot().save(options.out)
    print(f"{len(arm.history) - 1} actions applied, joint angles in {options.out}")


if __name__ == "__main__":
    main()
