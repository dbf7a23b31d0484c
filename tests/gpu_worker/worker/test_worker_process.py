"""The real process: its line on stdout, its signals, its exit codes."""

import asyncio
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from support.broker import RealBroker, free_port
from support.fake_host import FakeHost
from support.processes import Process, Processes

TESTS = str(Path(__file__).resolve().parents[2])
NOOP = ("--engine", "support.noop_engine:make", "--model", "noop")


def environment(url: str, **more: str) -> dict[str, str]:
    quick = {
        "WORLDLINE_HEARTBEAT_MS": "100",
        "WORLDLINE_WORKER_LOST_AFTER_MS": "1000",
        "WORLDLINE_BLOCK_MS": "1000",
    }
    return {"REDIS_URL": url, "PYTHONPATH": TESTS} | quick | more


def start(processes: Processes, broker: RealBroker, *args: str, **more: str) -> Process:
    return processes.module("gpu_worker", *NOOP, *args, env=environment(broker.url, **more))


async def ready(process: Process) -> str:
    match = await asyncio.to_thread(process.wait_for_line, r"^ready .*")
    return match[0]


async def test_it_says_ready_serves_and_ends_with_0_on_sigterm(
    processes: Processes, broker: RealBroker, host: FakeHost
) -> None:
    worker = start(processes, broker, "--session-capacity", "3")
    assert await ready(worker) == "ready worker=gpu-0 model=noop capacity=3"
    await host.chunk(await host.create("world-1"))

    assert await asyncio.to_thread(worker.stop, timeout=3) == 0
    assert await host.info() == {}


async def test_a_tick_in_hand_is_finished_on_sigint(
    processes: Processes, broker: RealBroker, host: FakeHost
) -> None:
    worker = start(processes, broker)
    await ready(worker)
    world = await host.create("world-1", sleep_ms=500)
    await host.send(world.tick())
    await asyncio.sleep(0.2)
    worker.send(signal.SIGINT)

    assert (await host.reply()).output is not None
    assert await asyncio.to_thread(worker.wait) == 0
    assert await host.stream_is_empty()


async def test_a_killed_worker_is_replaced_at_once_and_never_runs_its_tick_again(
    processes: Processes, broker: RealBroker, host: FakeHost
) -> None:
    first = start(processes, broker, WORLDLINE_HEARTBEAT_MS="2000", WORLDLINE_WORKER_LOST_AFTER_MS="90000")
    await ready(first)
    idle, world = await host.create("idle"), await host.create("world-1", exit_at=1)
    await host.chunk(idle)
    await host.chunk(world)
    request = world.tick()
    await host.send(request)
    assert await asyncio.to_thread(first.wait) == 9
    second = start(processes, broker)

    # The name of a process that is known to be dead is not waited for.
    assert (await host.reply(within_s=15)).error.code == "worker_restarted"
    assert (await host.notice()).session_id == "idle"
    await ready(second)
    await host.chunk(await host.create("world-2"))


async def test_a_second_worker_of_the_same_name_exits_with_4_while_the_first_lives(
    processes: Processes, broker: RealBroker, host: FakeHost
) -> None:
    first = start(processes, broker)
    await ready(first)
    second = start(processes, broker)

    assert await asyncio.to_thread(second.wait) == 4
    assert "gpu-0" in second.stderr
    await host.chunk(await host.create("world-1"))


async def test_a_paused_worker_that_was_replaced_exits_with_4_when_it_wakes(
    processes: Processes, broker: RealBroker, host: FakeHost
) -> None:
    first = start(processes, broker)
    await ready(first)
    await asyncio.sleep(0.2)
    first.pause()
    second = start(processes, broker)
    await ready(second)
    first.resume()

    assert await asyncio.to_thread(first.wait) == 4
    await host.chunk(await host.create("world-1"))


def test_a_broker_that_is_not_there_is_said_in_time_with_69(processes: Processes) -> None:
    url = f"redis://user:secret@127.0.0.1:{free_port()}/0"
    worker = processes.module("gpu_worker", *NOOP, env=environment(url))

    assert worker.wait() == 69
    assert "secret" not in worker.stderr + worker.stdout


def test_a_broker_that_does_not_answer_is_said_in_time_with_69(processes: Processes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}/0"
        worker = processes.module("gpu_worker", *NOOP, env=environment(url))

        assert worker.wait() == 69


@pytest.mark.parametrize(
    ("args", "env", "code", "said"),
    [
        (["--no-such-option"], {}, 2, "--no-such-option"),
        (["--device", "tpu"], {}, 78, "device"),
        (["--memory", "much"], {}, 78, "device_memory"),
        (["--param", "window_frames"], {}, 2, "K=JSON"),
        (["--set", "sink_frames=x"], {}, 2, "sink_frames"),
        (["--set", "num_layers=3"], {}, 78, "num_layers"),
        (["--engine", "nothing:make"], {}, 78, "engine"),
        ([], {"WORLDLINE_MODLE": "x"}, 78, "WORLDLINE_MODLE"),
        ([], {"REDIS_URL": "http://x"}, 78, "REDIS_URL"),
        ([], {"WORLDLINE_LOG_LEVEL": "loud"}, 78, "log_level"),
    ],
)
def test_a_wrong_option_or_setting_is_named(
    args: list[str], env: dict[str, str], code: int, said: str, processes: Processes
) -> None:
    worker = processes.module("gpu_worker", *args, env=environment("redis://127.0.0.1:1/0", **env))

    assert worker.wait() == code
    assert said in worker.stderr
    assert "Traceback" not in worker.stderr


async def test_an_engine_that_can_not_be_built_is_bad_configuration(
    processes: Processes, broker: RealBroker, host: FakeHost, tmp_path: Path
) -> None:
    (tmp_path / "small.py").write_text(
        "from contracts.errors import CapacityError\n"
        "def make(settings):\n"
        "    raise CapacityError('cannot fit one session', available_bytes=1, required_bytes=2)\n"
    )
    env = environment(broker.url, PYTHONPATH=str(tmp_path))
    worker = processes.module("gpu_worker", "--engine", "small:make", env=env)

    assert await asyncio.to_thread(worker.wait) == 78
    assert "cannot fit one session" in worker.stderr
    assert await host.info() == {}


async def test_a_setting_of_the_model_reaches_it_and_is_refused_by_it(
    processes: Processes, broker: RealBroker, host: FakeHost
) -> None:
    arguments = ("--device", "cpu", "--param", "window_frames=4", "--param", "windw_frames=4")
    worker = processes.module("gpu_worker", *arguments, env=environment(broker.url))

    assert await asyncio.to_thread(worker.wait) == 78
    assert "no setting 'windw_frames'" in worker.stderr
    assert "Traceback" not in worker.stderr
    assert await host.info() == {}


async def test_a_worker_that_loads_for_long_ends_at_once_on_sigterm(
    processes: Processes, broker: RealBroker, host: FakeHost, tmp_path: Path
) -> None:
    (tmp_path / "slow.py").write_text("import time\ndef make(settings):\n    time.sleep(60)\n")
    env = environment(broker.url, PYTHONPATH=str(tmp_path))
    worker = processes.module("gpu_worker", "--engine", "slow:make", env=env)
    await host.until(host.info, within_s=10)

    assert await asyncio.to_thread(worker.stop, timeout=5) == 0
    assert await host.info() == {}


async def test_the_reference_model_is_served_by_default(
    processes: Processes, broker: RealBroker, host: FakeHost
) -> None:
    worker = processes.script("worldline-worker", env={"REDIS_URL": broker.url, "WORLDLINE_DEVICE": "cpu"})
    line = await asyncio.to_thread(
        worker.wait_for_line, r"^ready worker=gpu-0 model=reference capacity=(\d+)", timeout=60
    )
    assert int(line[1]) >= 1
    world = await host.create("world-1")
    reply = await host.run(replace(world.tick(prompt="a forest"), model="reference"))

    assert reply.error is None
    assert reply.output.frames is not None
    assert await asyncio.to_thread(worker.stop) == 0


def test_help_is_given_without_a_broker() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gpu_worker", "--help"], capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 0
    assert "--gpu-memory-fraction" in done.stdout
