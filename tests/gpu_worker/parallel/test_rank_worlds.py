"""LingBot worlds on two ranks, encoder and decoder included, against the same on one process."""

import io

import numpy as np
import pytest
from PIL import Image

from support.lingbot_worlds import shared_checkpoint
from support.rank_processes import RankProcesses
from support.rank_worlds import make, settings_of, walk

SCRIPT = [
    *[("a", "rain over the valley", "w")] * 3,
    ("b", "snow falls", "dl"),
    *[("a", "snow falls over the river", "wj")]
    * 5,  # another prompt; from the seventh chunk on the window rolls
    ("b", "snow falls", "s"),
    ("a", "reset", ""),
    ("a", "rain over the valley", "w"),
    ("c", "night and still water", "i"),  # a third one: b, longest unused, goes
    ("c", "close", ""),
]


def picture() -> bytes:
    buffer = io.BytesIO()
    pixels = np.random.default_rng(3).integers(0, 256, (48, 64, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def test_ranks_plan_half_pages_with_the_least_memory_among_them(two_ranks: RankProcesses) -> None:
    checkpoint = str(shared_checkpoint())
    alone = make(settings_of(checkpoint, stepped=False)).memory()

    first, second = two_ranks.run(
        "support.rank_worlds:planned", checkpoint=checkpoint, memory=[1 << 30, 1 << 29]
    )

    assert first == second
    assert first["available_bytes"] == 1 << 29
    assert 2 * first["page_bytes"] == alone["page_bytes"]


@pytest.mark.parametrize("stepped", [False, True])
def test_two_ranks_make_the_worlds_of_one_process(two_ranks: RankProcesses, stepped: bool) -> None:
    checkpoint, image = str(shared_checkpoint()), picture()
    alone = make(settings_of(checkpoint, stepped=stepped))
    alone.start()
    expected = walk(alone, image, SCRIPT)

    (made, resident), failure = two_ranks.run(
        "support.rank_worlds:shared_walk", checkpoint=checkpoint, image=image, script=SCRIPT, stepped=stepped
    )

    assert failure is None
    assert resident == alone.resident_sessions() == ("a",)
    assert len(made) == len(expected) == 12
    for (latents, pictures), (wanted, drawn) in zip(made, expected, strict=True):
        assert np.linalg.norm(latents - wanted) <= 1e-5 * np.linalg.norm(wanted)
        assert np.abs(pictures.astype(int) - drawn).max() <= 1
    assert np.array_equal(made[10][0], made[0][0]), "after a reset the world begins again"
