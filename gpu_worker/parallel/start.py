"""How the processes of one worker come together: rank 0 serves the broker, the others do what it says."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Final

import structlog
import torch

from contracts.errors import ConfigurationError
from gpu_worker.config import WorkerSettings
from gpu_worker.device_name import device_of
from gpu_worker.engine import TickEngine
from gpu_worker.parallel.engine import LeadingEngine, Member, follow
from gpu_worker.parallel.launch import Launch
from gpu_worker.parallel.ranks import Ranks

MARGIN_S: Final = 30.0
"""What ranks may differ by beyond the execution limit, at which the watchdog ends the worker."""

log = structlog.get_logger(__name__)


def leader(factory: Callable[..., TickEngine], launch: Launch) -> Callable[[WorkerSettings], TickEngine]:
    """What rank 0 builds its engine with: the engine of `factory` on every rank."""
    return lambda settings: LeadingEngine(join(settings, factory, launch))


def run_follower(settings: WorkerSettings, factory: Callable[..., TickEngine], launch: Launch) -> int:
    """Another rank than 0, until rank 0 stops; returns the exit code, or raises what the worker ends for."""
    member = join(settings, factory, launch)
    log.info("following", rank=launch.rank)
    failure = follow(member)
    member.ranks.leave()
    if failure is not None:
        raise failure
    return 0


def join(settings: WorkerSettings, factory: Callable[..., TickEngine], launch: Launch) -> Member:
    """This process among those of its worker, its engine built; raises what building raises here, or on another rank."""
    name = device_of(settings.device)
    if ":" in name:
        raise ConfigurationError(
            f"device {name} is one, {launch.degree} processes run: say cuda", field="device"
        )
    if name == "cuda" and torch.cuda.device_count() < launch.degree:
        raise ConfigurationError(
            f"{launch.degree} processes need as many CUDA devices, there are {torch.cuda.device_count()}",
            field="ulysses_degree",
        )
    limit_s = settings.execution_limit_ms / 1000 + MARGIN_S
    ranks = Ranks(launch, torch.device(launch.device(name)), limit_s=limit_s)
    if launch.rank > 0:
        # Signals reach all ranks at once; rank 0 gives back its name, or finishes what is in hand, before the others go.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
    try:
        return Member(factory(settings, ranks=ranks), ranks)
    except BaseException:
        ranks.leave()
        raise
