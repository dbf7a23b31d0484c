"""`worldline demo`, whole: real processes, a producer that shares no code, two pictures."""

import signal
from pathlib import Path

import orjson
import pytest
from PIL import Image

from support.processes import REPOSITORY, Process, Processes

pytestmark = pytest.mark.real_broker


def demo(processes: Processes, out: Path, *arguments: str) -> Process:
    return processes.script("worldline", "demo", "--out", str(out), *arguments, cwd=out.parent)


def lockstep(processes: Processes, folder: Path, *runs: tuple[str, ...]) -> list[dict]:
    """Several runs side by side, each with its options."""
    started = [
        demo(processes, folder / str(number), "--lockstep", "--json", *options)
        for number, options in enumerate(runs)
    ]
    for process in started:
        assert process.wait(timeout=110) == 0, process.report()
    return [orjson.loads(process.stdout) for process in started]


def hashes(report: dict) -> list[str]:
    return [chunk["sha256"] for chunk in report["chunks"]]


def test_a_world_runs_free_and_is_seen(processes: Processes, tmp_path: Path) -> None:
    process = demo(processes, tmp_path / "pictures")

    assert process.wait(timeout=90) == 0, process.report()
    lines = process.stdout.splitlines()
    assert lines[0] == "committed 12 chunks"
    assert len([line for line in process.stderr.splitlines() if line.strip()[:1].isdigit()]) == 12
    assert "the same valley in snow" in process.stderr

    with Image.open(tmp_path / "pictures" / "world.webp") as moving:
        assert moving.size == (384, 384)
        assert 100 < moving.n_frames <= 144  # frames that are alike are stored once
    with Image.open(tmp_path / "pictures" / "contact_sheet.png") as sheet:
        assert sheet.width > 900
        assert len(sheet.convert("RGB").getcolors(1_000_000) or []) > 1_000
    assert list(tmp_path.iterdir()) == [tmp_path / "pictures"]


def test_in_lockstep_a_seed_and_its_events_decide_every_chunk(processes: Processes, tmp_path: Path) -> None:
    with_keys, again, without = lockstep(processes, tmp_path, (), (), ("--no-keys",))

    assert hashes(with_keys) == hashes(again)
    assert len(set(hashes(with_keys))) == 12
    first_key = next(chunk["index"] for chunk in with_keys["chunks"] if chunk["keys"])
    assert 0 < first_key < 11
    pairs = list(zip(hashes(with_keys), hashes(without), strict=True))
    assert all(one == two for one, two in pairs[:first_key])
    assert all(one != two for one, two in pairs[first_key:])

    # Only the keys are left out: the prompt switch is the same event at the same chunk.
    assert not any(chunk["keys"] for chunk in without["chunks"])
    assert [chunk["prompt"] for chunk in without["chunks"]] == [
        chunk["prompt"] for chunk in with_keys["chunks"]
    ]
    assert len({chunk["prompt"] for chunk in without["chunks"]}) == 2
    assert [len(chunk["applied_event_ids"]) for chunk in without["chunks"]].count(1) == 1

    assert [chunk["index"] for chunk in with_keys["chunks"]] == list(range(12))
    assert with_keys["summary"]["committed"] == 12
    assert with_keys["summary"]["events_applied"] == len(walk()) + 1


def test_it_is_stopped_without_leaving_anything(processes: Processes, tmp_path: Path) -> None:
    process = demo(processes, tmp_path / "pictures", "--chunks", "1000")
    process.wait_for_line(r"^ +1 ", timeout=60, stream="stderr")
    children = process.children()

    process.send(signal.SIGINT)

    assert process.wait() == 130
    assert len(children) == 4  # and the producer
    assert not any(Path(f"/proc/{pid}").exists() for pid in children)
    assert not (tmp_path / "pictures").exists()


def test_a_worker_that_dies_ends_it_with_a_reason(processes: Processes, tmp_path: Path) -> None:
    process = demo(processes, tmp_path / "pictures", "--chunks", "1000")
    process.wait_for_line(r"^ +1 ", timeout=60, stream="stderr")
    worker = next(
        pid for pid in process.children() if b"gpu_worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    )

    processes.start("/bin/kill", "-9", str(worker)).wait()

    assert process.wait() == 1
    assert "the worker ended" in process.stderr


FAILING = """
from gpu_worker.models.reference.pipeline import ReferencePipeline

class Failing(ReferencePipeline):
    def forward(self, request):
        if request.tick.chunk_index == 2:
            raise ZeroDivisionError("nothing is this small")
        return super().forward(request)
"""


@pytest.mark.parametrize("options", [(), ("--lockstep",)], ids=["free", "lockstep"])
def test_a_model_that_fails_ends_it_with_the_models_words(
    processes: Processes, tmp_path: Path, options: tuple[str, ...]
) -> None:
    info = tmp_path / "site" / "failing-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: failing\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[worldline.pipelines]\nfailing = failing:Failing\n")
    (tmp_path / "site" / "failing.py").write_text(FAILING)
    process = processes.script(
        "worldline",
        *("demo", "--model", "failing", "--out", str(tmp_path / "pictures"), *options),
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path / "site")},
    )

    assert process.wait(timeout=90) == 1, process.report()
    assert "ZeroDivisionError: nothing is this small" in process.stderr
    assert "Traceback" not in process.stderr
    assert not (tmp_path / "pictures").exists()


def test_the_walk_leaves_the_first_chunks_alone_and_is_called_what_it_is() -> None:
    steps = walk()

    assert all(set(step) == {"t_ms", "actions"} for step in steps)
    assert [step["t_ms"] for step in steps] == sorted(step["t_ms"] for step in steps)
    assert steps[0]["t_ms"] >= 400
    folder = REPOSITORY / "examples" / "first_session"
    assert "by hand" in (folder / "README.md").read_text()
    assert all(len(path.read_text().splitlines()) < 80 for path in folder.iterdir() if path.is_file())


def test_the_producer_shares_no_code_with_us() -> None:
    source = (REPOSITORY / "examples" / "first_session" / "producer.py").read_text()

    assert "import redis\n" in source
    assert not any(f"{package}" in source for package in ("actors", "contracts", "gpu_worker", "worldline."))


def walk() -> list[dict]:
    path = REPOSITORY / "examples" / "first_session" / "walk.jsonl"
    return [orjson.loads(line) for line in path.read_text().splitlines()]
