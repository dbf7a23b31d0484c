"""`worldline-worker`, also `python -m gpu_worker`: one GPU worker process.

Exit codes: 0 told to end, 2 usage, 4 another live process has the name, 65 corrupt data in the broker, 69 the broker
can't be reached, 70 the engine's memory can't be trusted any more or a process of the worker is gone, 78 bad
configuration. A worker on several devices is started by torchrun, one process a device.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import sys
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Final

import structlog
import typer

from contracts import failpoints
from contracts.assignments import parse_assignments
from contracts.config import load_settings
from contracts.errors import (
    BrokerError,
    ConfigurationError,
    CorruptDataError,
    InvalidArgumentError,
    KVStateError,
    WorldlineError,
)
from contracts.event_loop import run
from contracts.logs import configure_logging
from gpu_worker.config import WorkerSettings, launch
from gpu_worker.device_name import device_of
from gpu_worker.engine import TickEngine, load_engine
from gpu_worker.guard import guarded
from gpu_worker.name import NameTakenError
from gpu_worker.parallel.launch import Launch
from gpu_worker.worker import Worker

if TYPE_CHECKING:
    from gpu_worker.parallel.ranks import Ranks

EXIT_OK: Final = 0
EXIT_CODES: Final[tuple[tuple[type[WorldlineError], int], ...]] = (
    (NameTakenError, 4),
    (CorruptDataError, 65),
    (BrokerError, 69),
    (KVStateError, 70),
    (ConfigurationError, 78),
)

EngineFactory = Callable[..., TickEngine]
"""Called with the settings; and with `ranks`, those that share every sequence, where the worker has several devices."""

ENGINES: Final = {"vllm-omni": "gpu_worker.omni_engine:make_engine"}
"""Engines that have a name of their own."""

log = structlog.get_logger(__name__)
app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def worker(  # noqa: PLR0917 - typer calls it by name
    model: Annotated[str | None, typer.Option(help="Entry point name of the model.")] = None,
    checkpoint: Annotated[str | None, typer.Option(help="Directory of the model's checkpoint.")] = None,
    worker_id: Annotated[
        str | None, typer.Option("--id", help="Name of this worker; one process a name.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:N.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32, float16 or bfloat16; left out, the model's own.")
    ] = None,
    memory: Annotated[
        str | None, typer.Option(help="Device memory to plan with, for example 141GB or 80GiB.")
    ] = None,
    gpu_memory_fraction: Annotated[
        float | None, typer.Option(help="Share of it for sessions, 0 to 1.")
    ] = None,
    session_capacity: Annotated[int | None, typer.Option(help="Resident sessions wanted.")] = None,
    payload_url: Annotated[str | None, typer.Option(help="redis: or a URL such as file:///dir.")] = None,
    redis_url: Annotated[str | None, typer.Option(help="The broker.")] = None,
    ulysses_degree: Annotated[
        int | None, typer.Option(help="Devices that share every sequence; start as many with torchrun.")
    ] = None,
    param: Annotated[
        list[str] | None, typer.Option(metavar="K=JSON", help="A setting of the model; repeatable.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="FIELD=VALUE",
            help="Another window_frames, sink_frames or reset_at_boundary than the model's; repeatable.",
        ),
    ] = None,
    engine: Annotated[
        str | None, typer.Option(help="vllm-omni, or module:factory of an engine; called with the settings.")
    ] = None,
) -> None:
    """Runs one GPU worker until SIGTERM or SIGINT. Options win over the environment (WORLDLINE_*, REDIS_URL)."""
    overrides: dict[str, object] = {
        "model": model,
        "checkpoint": checkpoint,
        "worker_id": worker_id,
        "device": device,
        "dtype": dtype,
        "device_memory": memory,
        "gpu_memory_fraction": gpu_memory_fraction,
        "session_capacity": session_capacity,
        "payload_url": payload_url,
        "redis_url": redis_url,
        "ulysses_degree": ulysses_degree,
    }
    try:
        overrides["model_params"] = parse_assignments(param or [], "param") or None
        overrides["kv_config"] = parse_assignments(set_ or [], "set", form="FIELD=VALUE") or None
        settings = load_settings(WorkerSettings, **overrides)
        configure_logging(settings.log_level, settings.log_format)
        failpoints.arm(settings.failpoints)
        here = launch()
        settings.parallel.check_started(here.degree)
        factory = load_installed_model if engine is None else load_factory(engine)
        if here.degree > 1 and "ranks" not in inspect.signature(factory).parameters:
            raise ConfigurationError("this engine runs on one device only", field="ulysses_degree")
    except ConfigurationError as error:
        raise typer.Exit(explain(error)) from None
    except InvalidArgumentError as error:
        raise typer.BadParameter(error.message) from None
    raise typer.Exit(run_rank(settings, factory, here))


def run_rank(settings: WorkerSettings, factory: EngineFactory, here: Launch) -> int:
    """Runs the worker, or what is this process's part of one on several devices; returns the exit code."""
    if here.degree == 1:
        return run(serve(settings, factory))
    from gpu_worker.parallel.start import leader, run_follower

    if here.rank == 0:
        return run(serve(settings, leader(factory, here)))
    try:
        return run_follower(settings, factory, here)
    except tuple(kind for kind, _ in EXIT_CODES) as error:
        return explain(error)


async def serve(settings: WorkerSettings, factory: EngineFactory) -> int:
    """Runs a worker until a signal ends it; returns the exit code."""
    try:
        running = Worker(settings, lambda: factory(settings), on_ready=announce_ready)
    except ConfigurationError as error:
        return explain(error)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, running.stop)
    log.info("starting", worker=settings.worker_id, broker=settings.shown_url)
    code = EXIT_OK
    try:
        async with guarded(settings, running.incarnation):
            await running.run()
    except tuple(kind for kind, _ in EXIT_CODES) as error:
        code = explain(error)
    if running.engine.running:
        # It still loads its model: the thread can't be stopped, and nobody waits for it.
        sys.stderr.flush()
        os._exit(code)
    return code


def explain(error: WorldlineError) -> int:
    """Says on stderr what went wrong, field included; returns the exit code."""
    field = f" [{error.field}]" if error.field else ""
    typer.echo(f"error: {error}{field}", err=True)
    return next(code for kind, code in EXIT_CODES if isinstance(error, kind))


def announce_ready(running: Worker) -> None:
    """The line that supervisors and tests wait for."""
    engine = running.engine
    sys.stdout.write(f"ready worker={running.worker_id} model={engine.model} capacity={engine.capacity}\n")
    sys.stdout.flush()


def load_installed_model(settings: WorkerSettings, ranks: Ranks | None = None) -> TickEngine:
    """The engine of this project, for a pipeline that is installed."""
    return load_engine(
        settings.model,
        device=device_of(settings.device) if ranks is None else ranks.device,
        dtype=settings.dtype,
        gpu_memory_fraction=settings.gpu_memory_fraction,
        available_bytes=settings.device_memory,
        session_capacity=settings.session_capacity,
        scratch_blocks_per_branch=settings.scratch_blocks_per_branch,
        attention_backend=settings.attention_backend,
        step_execution=settings.step_execution,
        kv=settings.kv_config,
        pipeline_config=settings.pipeline_config,
        ranks=ranks,
    )


def load_factory(name: str) -> EngineFactory:
    """The function `module:factory`, or the one behind a name; ConfigurationError where there is none."""
    module, _, attribute = ENGINES.get(name, name).partition(":")
    try:
        factory: EngineFactory = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationError(f"engine {name!r} can't be loaded: {error}", field="engine") from error
    return factory


def main() -> None:
    """The console script."""
    app(prog_name="worldline-worker")


if __name__ == "__main__":
    main()
