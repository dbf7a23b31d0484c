"""Worlds of the tiny LingBot checkpoint, made tick by tick by one engine or by one that several ranks share."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from contracts.lingbot import actions_control
from contracts.tick import ARDiffusionTickRequest
from gpu_worker.config import WorkerSettings
from gpu_worker.engine import TickEngine
from gpu_worker.parallel.engine import LeadingEngine, Member, follow
from gpu_worker.parallel.ranks import Ranks
from gpu_worker.parallel.requests import Order, RankRequest
from support.lingbot_engine import MODEL, make

Step = tuple[str, str, str]
"""Session, prompt, keys; or session, "reset" or "close", and nothing."""


def settings_of(checkpoint: str, *, stepped: bool) -> WorkerSettings:
    return WorkerSettings(
        model=MODEL,
        checkpoint=checkpoint,
        ar_diffusion_height=32,
        ar_diffusion_width=48,
        step_execution=stepped,
        session_capacity=2,
    )


def planned(ranks: Ranks, checkpoint: str, memory: list[int]) -> dict[str, int]:
    """The plan of a rank on whose device there is so much; the model as it was loaded."""
    settings = settings_of(checkpoint, stepped=False).model_copy(update={"device_memory": memory[ranks.rank]})
    return dict(make(settings, ranks).memory())


def walk(engine: TickEngine, image: bytes, script: Sequence[Step]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Latents and pictures of each tick."""
    made, positions = [], dict[str, int]()
    for session, prompt, keys in script:
        if prompt in {"reset", "close"}:
            {"reset": engine.reset_session, "close": engine.close_session}[prompt](session)
            positions.pop(session)
            continue
        index = positions.get(session, 0)
        control = actions_control([tuple(keys)] * 3)
        tick = ARDiffusionTickRequest(session, f"{session}-{index}", index, (), prompt, (control,))
        output = engine.execute_tick(tick, params={"images": [image]}, seed=7)
        positions[session] = index + 1
        made.append((output.payload["latents"].numpy(), np.asarray(output.frames)))
    engine.check_integrity()
    return made


def shared_walk(ranks: Ranks, checkpoint: str, image: bytes, script: Sequence[Step], *, stepped: bool) -> Any:
    """The same by several ranks; rank 0 returns what was made."""
    member = Member(make(settings_of(checkpoint, stepped=stepped), ranks), ranks)
    if ranks.rank > 0:
        return follow(member)
    engine = LeadingEngine(member)
    engine.start()
    made = walk(engine, image, script)
    ranks.send(RankRequest(Order.STOP).encode())
    return made, engine.resident_sessions()
