"""The real command: a directory that is not the published checkpoint is refused by name, and no world is begun."""

import asyncio

import pytest

from support.broker import RealBroker
from support.lingbot_worlds import shared_checkpoint
from support.processes import Processes

CONFIGURATION_ERROR = 78


@pytest.mark.parametrize(
    ("checkpoint", "words"),
    [
        (None, "needs a checkpoint directory [checkpoint]"),
        ("tiny", "the VAE's base_dim must be 96, the checkpoint says 4 [base_dim]"),
    ],
)
async def test_a_worker_without_the_published_checkpoint_says_so_and_ends(
    processes: Processes, broker: RealBroker, checkpoint: str | None, words: str
) -> None:
    named = (
        []
        if checkpoint is None
        else ["--checkpoint", str(shared_checkpoint()) if checkpoint == "tiny" else checkpoint]
    )

    worker = processes.module("gpu_worker", "--model", "lingbot-world", *named, env={"REDIS_URL": broker.url})
    status = await asyncio.to_thread(worker.wait, timeout=60)

    assert status == CONFIGURATION_ERROR
    said = worker.stdout + worker.stderr
    assert words in said
    assert str(shared_checkpoint()) not in said
