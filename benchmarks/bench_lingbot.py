"""What a LingBot World tick spends outside its transformer, and what its two savings save, at tiny size on the CPU.

    python benchmarks/bench_lingbot.py [--json] [--smoke] [--rounds N]

A tick through broker, host and worker takes turns with the same tick on a runner alone, whose parts are timed; a world
as it is takes turns with worlds that compute camera modulation for each pass, or encode grey frames for ever. All of
them make the same latents, which is checked bit by bit. Only the ratios of one run mean something.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from PIL import Image

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))  # its tiny checkpoint

from actors.broker_pool import Broker
from actors.client import SessionClient
from actors.config import ClientSettings
from contracts import event_loop
from contracts.events import ARDiffusionControlInput, ARDiffusionSessionEvent
from contracts.lingbot import CAMERA_ACTIONS_SCHEMA, CAMERA_TRACK
from gpu_worker.config import WorkerSettings
from gpu_worker.models.lingbot_world.conditioning import EncoderState
from lingbot_parts import (
    HELD,
    PARTS,
    PROMPT,
    SESSION,
    ModulatedEachPass,
    NeverAtRest,
    TinyWorld,
    same_bits,
)
from machines import describe
from measuring import Contender, interleave, ratio
from stacks import broker, worldline
from support.lingbot_checkpoint import write_checkpoint
from tables import show

MODEL = "lingbot-world"
PREFIX = "lingbot"
IMAGE_KEY = "bench-image"
TARGETS = {
    "modulation once / for each pass": 1.0,
    "encoder at rest / encoding": 1.0,
    "encode at rest / running": 0.1,
}
"""All are to stay below."""

LATENTS = {"output_type": "latent"}


@dataclass(frozen=True)
class Size:
    """How much is measured, and of which pictures."""

    height: int
    width: int
    rounds: int
    ticks: int


FULL = Size(height=64, width=96, rounds=15, ticks=4)
SMOKE = Size(height=32, width=48, rounds=2, ticks=1)


def stored_image(size: Size) -> bytes:
    """A picture's file."""
    noise = torch.randint(0, 256, (size.height, size.width, 3), dtype=torch.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise.numpy()).save(buffer, "PNG")
    return buffer.getvalue()


@contextlib.asynccontextmanager
async def session(url: str, image: bytes) -> AsyncIterator[SessionClient]:
    """A session that walks ahead, its first chunk made."""
    settings = ClientSettings(REDIS_URL=url, prefix=PREFIX)  # type: ignore[call-arg]
    async with Broker(settings=settings) as shared, SessionClient(SESSION, shared) as client:
        await shared.commands.set(IMAGE_KEY, image)
        await client.create(
            model=MODEL,
            reducer="lingbot-camera",
            seed=7,
            prompt=PROMPT,
            params={"images": [f"redis:{IMAGE_KEY}"]},
        )
        held = {"mode": "state", "transitions": [{"actions": list(HELD)}]}
        walk = ARDiffusionControlInput(CAMERA_TRACK, CAMERA_ACTIONS_SCHEMA, held)
        await client.accept_event(ARDiffusionSessionEvent(1, controls=(walk,)))
        await client.next_chunk()
        yield client


async def measure_shares(url: str, settings: WorkerSettings, image: bytes, size: Size) -> dict[str, Any]:
    """Where the time of a tick goes, from `next_chunk()` to its answer, once the encoder rests."""
    world = TinyWorld(settings, image)
    chunks = world.run_until_at_rest()
    variables = {f"WORLDLINE_{name.upper()}": str(value) for name, value in settings.pipeline_config.items()}
    with worldline(
        url,
        url,
        prefix=PREFIX,
        capacity=1,
        engine="support.lingbot_engine:make",
        model=MODEL,
        settings=variables,
    ):
        async with session(url, image) as client:

            async def tick() -> None:
                await client.next_chunk()

            for _ in range(chunks):
                await tick()
            watch = world.watch_parts()
            whole = Contender("tick, from client to answer", tick, size.ticks)
            alone = Contender("tick, its runner alone", world.tick, size.ticks)
            await interleave([whole, alone], rounds=size.rounds)
    inside = ratio(alone, whole, digits=6)
    shares = {name: inside * watch.seconds[name] / watch.seconds["tick"] for name in PARTS}
    shares["book-keeping: pages, checks, sampler"] = inside - sum(shares.values())
    shares["broker, host, client, payloads"] = 1 - inside
    return {
        "times": {row.name: row.figures() for row in (whole, alone)},
        "shares": shares | {"outside the transformer": 1 - shares["transformer: five passes"]},
        "passes": watch.calls["transformer: five passes"] / watch.calls["tick"],
    }


async def measure_savings(settings: WorkerSettings, image: bytes, size: Size) -> dict[str, Any]:
    """Ticks for latents alone: as they are, and without each saving."""
    worlds = {
        "tick, latents alone": TinyWorld(settings, image, **LATENTS),
        "tick, modulation for each pass": ModulatedEachPass(settings, image, **LATENTS),
        "tick, encoding for ever": NeverAtRest(settings, image, **LATENTS),
    }
    plain, modulated, encoding = worlds.values()
    first = plain.watch_work()
    plain.tick()
    calls = {"encoder calls, while the image passes through": first.calls["encoder call"]}
    chunks = plain.run_until_at_rest()
    for world in (modulated, encoding):
        while len(world.digests) < chunks:
            world.tick()
    rows = {name: Contender(name, world.tick, size.ticks) for name, world in worlds.items()}
    rows |= {row.name: row for row in encoder_alone(plain, size)}
    await interleave(list(rows.values()), rounds=size.rounds)
    once, each, never, rest, running = rows.values()
    return {
        "times": {name: row.figures() for name, row in rows.items()},
        "ratios": {
            "modulation once / for each pass": ratio(once, each),
            "encoder at rest / encoding": ratio(once, never),
            "encode at rest / running": ratio(rest, running, digits=4),
        },
        "work": calls
        | work_of_a_chunk(plain, modulated)
        | {
            "chunks until the encoder rests": chunks,
            "chunks equal bit by bit in all three worlds": same_bits(list(worlds.values())),
        },
    }


def encoder_alone(world: TinyWorld, size: Size) -> list[Contender]:
    """The encoder's part of one block: at rest, and running from the same history."""
    rest = world.encoder
    running = EncoderState(rest.history)
    return [
        Contender("encode, at rest", lambda: world.encode(rest), size.ticks),
        Contender("encode, running", lambda: world.encode(running), size.ticks),
    ]


def work_of_a_chunk(plain: TinyWorld, modulated: TinyWorld) -> dict[str, int]:
    """How often a block's camera modulation is computed for a chunk, with and without the saving."""
    counted = {}
    for name, world in (("as it is", plain), ("for each pass", modulated)):
        watch = world.watch_work()
        world.tick()
        counted[f"modulations of a block, {name}"] = (
            watch.calls["camera modulation of a block"] // world.blocks
        )
        if world is plain:
            counted["encoder calls, at rest"] = watch.calls["encoder call"]
    return counted


async def run(size: Size) -> dict[str, Any]:
    """The whole benchmark."""
    torch.set_num_threads(1)
    image = stored_image(size)
    with tempfile.TemporaryDirectory(prefix="worldline-bench-") as folder, broker() as url:
        settings = WorkerSettings(
            model=MODEL,
            checkpoint=str(await asyncio.to_thread(write_checkpoint, Path(folder))),
            ar_diffusion_height=size.height,
            ar_diffusion_width=size.width,
        )
        machine = describe(url)
        machine["libraries"] |= {name: version(name) for name in ("torch", "diffusers", "transformers")}
        shares = await measure_shares(url, settings, image, size)
        savings = await measure_savings(settings, image, size)
    return {
        "benchmark": "lingbot",
        "rounds": size.rounds,
        "operations_a_batch": size.ticks,
        "pictures": [size.height, size.width],
        "machine": machine,
        "times": shares["times"] | savings["times"],
        "ratios": savings["ratios"],
        "targets": TARGETS,
        "shares of a tick": shares["shares"],
        "work of a chunk": {"passes of the transformer": round(shares["passes"])} | savings["work"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--smoke", action="store_true", help="the smallest possible run: shows that it works")
    parser.add_argument("--rounds", type=int, help="interleaved batches of each contender")
    options = parser.parse_args()
    size = SMOKE if options.smoke else FULL
    if options.rounds:
        size = Size(**{**vars(size), "rounds": options.rounds})
    report = event_loop.run(run(size))
    print(json.dumps(report, indent=2)) if options.json else show(report)


if __name__ == "__main__":
    main()
