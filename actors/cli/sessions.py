"""`worldline sessions`: create, list, show, push, next, run, pause, reset, close."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import typer

from actors.broker_pool import Broker
from actors.cli.exit_codes import ExitCode
from actors.cli.options import HOST_WAIT_S, JsonOption, SessionArgument, TimeoutOption, with_session
from actors.cli.output import clock, note, print_error, print_fields, print_json, print_table
from actors.cli.parsing import parse_control, parse_params
from actors.client import SessionClient, SessionStart
from actors.session_list import list_sessions
from contracts.creation import DEFAULT_MAX_PENDING_EVENTS, DEFAULT_RECORDING, DEFAULT_REDUCER
from contracts.errors import WorldlineError
from contracts.events import ARDiffusionSessionEvent
from contracts.lifecycle import Status
from contracts.state import CommittedChunk

app = typer.Typer(help="Work with sessions, each of which is one world.", no_args_is_help=True)

CHUNK_COLUMNS = ("chunk", "events", "queued ms", "ran ms", "to applied ms", "bytes", "sha256")


def chunk_row(chunk: CommittedChunk) -> tuple[object, ...]:
    """What people want to know of a chunk."""
    events = ",".join(map(str, chunk.applied_event_ids)) or "-"
    waited = "-" if chunk.accepted_to_applied_ms is None else chunk.accepted_to_applied_ms
    return (
        chunk.chunk_index,
        events,
        chunk.queued_ms,
        chunk.executed_ms,
        waited,
        chunk.bytes,
        chunk.sha256[:12],
    )


@app.command()
def create(
    session_id: SessionArgument,
    *,
    model: Annotated[
        str, typer.Option(help="The model; a worker that serves it must be running.", show_default=False)
    ],
    reducer: Annotated[str, typer.Option(help="How events become a tick's controls.")] = DEFAULT_REDUCER,
    seed: Annotated[
        int | None, typer.Option(help="All randomness comes from it.", show_default=False)
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="The first prompt.", show_default=False)] = None,
    param: Annotated[
        list[str] | None,
        typer.Option(metavar="K=JSON", help="A parameter for the model; repeatable.", show_default=False),
    ] = None,
    pace_ms: Annotated[
        int | None, typer.Option(help="Run free, one chunk each so often.", show_default=False)
    ] = None,
    presence_ms: Annotated[
        int | None, typer.Option(help="Close when its client has been gone so long.", show_default=False)
    ] = None,
    idle_ms: Annotated[
        int | None, typer.Option(help="Close when nothing came for so long.", show_default=False)
    ] = None,
    max_pending_events: Annotated[
        int, typer.Option(help="Length of the event queue.")
    ] = DEFAULT_MAX_PENDING_EVENTS,
    recording: Annotated[
        str, typer.Option(help='Committed ticks to keep: "off", "all" or "last N".')
    ] = DEFAULT_RECORDING,
    timeout: TimeoutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Create a session."""
    params = parse_params(param or [])

    async def work(session: SessionClient) -> SessionStart:
        return await session.create(
            model=model,
            reducer=reducer,
            seed=seed,
            prompt=prompt,
            params=params,
            recording=recording,
            max_pending_events=max_pending_events,
            pace_ms=pace_ms,
            presence_ms=presence_ms,
            idle_ms=idle_ms,
        )

    _print_start(session_id, with_session(session_id, timeout, work), "created", as_json=as_json)


@app.command("list")
def list_(
    status: Annotated[
        list[Status] | None,
        typer.Option(case_sensitive=False, help="Only these; repeatable.", show_default=False),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="At most so many, newest first.", show_default=False)
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List sessions, those that changed last first."""

    async def work() -> list[dict[str, Any]]:
        async with Broker(host_wait_s=HOST_WAIT_S) as broker:
            return [entry async for entry in list_sessions(broker, status or list(Status), limit=limit)]

    entries = asyncio.run(work())
    if as_json:
        print_json(entries)
    else:
        columns = ("session", "status", "model", "chunk", "pending", "worker", "changed", "failure")
        names = ("session_id", "status", "model", "chunk_index", "pending_events", "worker")
        print_table(
            columns,
            [
                (*(entry.get(name) for name in names), clock(entry.get("updated_at_ms")), _trouble(entry))
                for entry in entries
            ],
        )
    if any("error" in entry for entry in entries):
        raise typer.Exit(ExitCode.SOME_FAILED)


@app.command()
def show(session_id: SessionArgument, as_json: JsonOption = False) -> None:
    """Show the state of a session."""
    fields = with_session(session_id, None, SessionClient.state).to_dict()
    if as_json:
        print_json(fields)
    else:
        times = {name: clock(fields[name]) for name in ("created_at_ms", "updated_at_ms")}
        print_fields(
            {name: value for name, value in (fields | times).items() if value not in (None, {}, [], "")}
        )


@app.command()
def push(
    session_id: SessionArgument,
    event_id: Annotated[
        int, typer.Option(help="Unique and increasing within the session.", show_default=False)
    ],
    prompt: Annotated[str | None, typer.Option(help="The new prompt.", show_default=False)] = None,
    control: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TRACK:SCHEMA:JSON", help="The new value of a track; repeatable.", show_default=False
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Give the session an event: a prompt, controls, or both."""
    event = ARDiffusionSessionEvent(event_id, prompt, tuple(parse_control(text) for text in control or []))
    receipt = with_session(session_id, None, lambda session: session.accept_event(event))
    if as_json:
        print_json(
            {
                "session_id": receipt.session_id,
                "event_id": receipt.event_id,
                "status": receipt.status,
                "pending_event_count": receipt.pending_event_count,
            }
        )
    else:
        typer.echo(f"event {receipt.event_id}: {receipt.status}, {receipt.pending_event_count} pending")


@app.command("next")
def next_(
    session_id: SessionArgument,
    count: Annotated[int, typer.Option(min=1, help="How many chunks, one after the other.")] = 1,
    timeout: TimeoutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Generate the next chunks from what is pending."""
    chunks: list[CommittedChunk] = []
    failure: WorldlineError | None = None

    async def work(session: SessionClient) -> None:
        for _ in range(count):
            chunks.append(await session.next_chunk())
            if count > 1:
                note(f"chunk {chunks[-1].chunk_index} committed ({len(chunks)} of {count})")

    try:
        with_session(session_id, timeout, work)
    except WorldlineError as error:
        if not chunks:
            raise
        failure = error
    if as_json:
        print_json([chunk.to_dict() for chunk in chunks])
    else:
        print_table(CHUNK_COLUMNS, map(chunk_row, chunks))
    if failure is not None:  # what was committed is told all the same
        print_error(failure, as_json=False)
        raise typer.Exit(ExitCode.SOME_FAILED)


@app.command()
def run(
    session_id: SessionArgument,
    pace_ms: Annotated[int | None, typer.Option(help="One chunk each so often.", show_default=False)] = None,
    timeout: TimeoutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let the session run free, one chunk after the other."""
    with_session(session_id, timeout, lambda session: session.run(pace_ms))
    _print_done(
        {"session_id": session_id, "running": True}, f"session {session_id} runs free", as_json=as_json
    )


@app.command()
def pause(session_id: SessionArgument, timeout: TimeoutOption = None, as_json: JsonOption = False) -> None:
    """End free running."""
    with_session(session_id, timeout, SessionClient.pause)
    _print_done({"session_id": session_id, "running": False}, f"session {session_id} pauses", as_json=as_json)


@app.command()
def reset(session_id: SessionArgument, timeout: TimeoutOption = None, as_json: JsonOption = False) -> None:
    """Start the world over from its seed."""
    _print_start(session_id, with_session(session_id, timeout, SessionClient.reset), "reset", as_json=as_json)


@app.command()
def close(
    session_id: SessionArgument,
    reason: Annotated[str | None, typer.Option(help="For the session's history.", show_default=False)] = None,
    timeout: TimeoutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Close the session and free its memory; also the retry for one whose clean-up failed."""
    status = with_session(session_id, timeout, lambda session: session.close(reason))
    _print_done(
        {"session_id": session_id, "status": status}, f"session {session_id} is {status}", as_json=as_json
    )


def _print_start(session_id: str, start: SessionStart, what: str, *, as_json: bool) -> None:
    document = {
        "session_id": session_id,
        "life": start.life,
        "chunk_index": start.chunk_index,
        "event_floor": start.event_floor,
    }
    text = f"session {session_id} {what}: chunk {start.chunk_index}, event floor {start.event_floor}"
    _print_done(document, text, as_json=as_json)


def _print_done(document: dict[str, Any], text: str, *, as_json: bool) -> None:
    if as_json:
        print_json(document)
    else:
        typer.echo(text)


def _trouble(entry: dict[str, Any]) -> str:
    """Why a session is in no good state, if it is not."""
    error = entry.get("error")
    return error["message"] if error else entry.get("failure_code") or entry.get("cleanup_error") or ""
