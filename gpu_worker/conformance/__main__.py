"""`python -m gpu_worker.conformance MODEL`: does a pipeline keep the contract?

Exit codes: 0 every check passed, 1 one failed, 2 usage, 78 no such model.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from contracts.assignments import parse_assignments
from contracts.errors import ConfigurationError, InvalidArgumentError, WorldlineError
from contracts.events import ARDiffusionControlInput, loads
from contracts.kv_spec import ARDiffusionKVCacheSpec
from gpu_worker.conformance.subject import Subject
from gpu_worker.conformance.suite import CheckResult, Outcome, passed, run_conformance
from gpu_worker.device import resolve_device, resolve_dtype
from gpu_worker.registry import load_pipeline_factory

_PROMPT = "{prompt}"
_STYLES = {
    Outcome.PASSED: "green",
    Outcome.FAILED: "bold red",
    Outcome.NOT_APPLICABLE: "dim",
    Outcome.NOT_RUN: "yellow",
}

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def check(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="An installed model.")],
    *,
    param: Annotated[
        list[str] | None,
        typer.Option(metavar="K=JSON", help="A creation parameter of the sessions; repeatable."),
    ] = None,
    config: Annotated[
        list[str] | None, typer.Option(metavar="K=JSON", help="A setting of the model; repeatable.")
    ] = None,
    control: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TRACK:SCHEMA:JSON", help="A control of every tick, {prompt} in it replaced; repeatable."
        ),
    ] = None,
    image: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE", help="An image of the sessions, or of every tick's control; repeatable."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, float16 or bfloat16.")] = "float32",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")] = False,
) -> None:
    """Put a pipeline through every check of the contract."""
    logging.disable(logging.ERROR)  # failures are made on purpose here, and the log would tell each of them
    torch.set_num_threads(
        1
    )  # chunks are compared byte by byte, and how sums are split up changes their last bit
    try:
        subject = Subject(
            load_pipeline_factory(model),
            device=resolve_device(device),
            dtype=resolve_dtype(dtype),
            config=parse_assignments(config or [], "config"),
            params=parse_assignments(param or [], "param") | _images(image or []),
            planned_spec=_planned_spec(model, dtype),
            controls=_controls(control or []),
        )
    except WorldlineError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(78 if isinstance(error, ConfigurationError) else 2) from None
    results = run_conformance(subject)
    _print(model, results, as_json=as_json)
    raise typer.Exit(0 if passed(results) else 1)


def _images(files: Sequence[Path]) -> dict[str, Any]:
    try:
        return {"images": [file.read_bytes() for file in files]} if files else {}
    except OSError as error:
        raise InvalidArgumentError(f"--image: {error.strerror}", field="image") from None


def _controls(texts: Sequence[str]) -> Callable[[str], tuple[ARDiffusionControlInput, ...]]:
    """What every tick of a prompt carries; checked with one that is short."""

    def controls(prompt: str) -> tuple[ARDiffusionControlInput, ...]:
        return tuple(_control(text.replace(_PROMPT, json.dumps(prompt)[1:-1])) for text in texts)

    controls("x")
    return controls


def _control(text: str) -> ARDiffusionControlInput:
    parts = text.split(":", 2)
    if len(parts) != 3:
        raise InvalidArgumentError(f"--control is TRACK:SCHEMA:JSON, got {text!r:.80}", field="control")
    return ARDiffusionControlInput(parts[0], parts[1], loads(parts[2], f"control {parts[0]}"))


def _planned_spec(model: str, dtype: str) -> Callable[[Mapping[str, Any]], ARDiffusionKVCacheSpec] | None:
    points = {point.name: point for point in entry_points(group="worldline.kv_specs")}
    if model not in points:
        return None

    def planned(config: Mapping[str, Any]) -> ARDiffusionKVCacheSpec:
        # Loaded when the check asks for it, so that what goes wrong then is a result.
        function = points[model].load()
        if hasattr(function, "default_dtype"):  # such a one takes the element type as a setting
            config = {**config, "dtype": dtype}
        spec: ARDiffusionKVCacheSpec = function(config)
        return spec

    return planned


def _print(model: str, results: Sequence[CheckResult], *, as_json: bool) -> None:
    if as_json:
        checks = [result.to_dict() for result in results]
        typer.echo(json.dumps({"model": model, "passed": passed(results), "checks": checks}, indent=2))
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("check", "outcome", ""):
        table.add_column(column, overflow="fold")
    for result in results:
        outcome = Text(result.outcome, _STYLES[result.outcome])
        table.add_row(Text(result.name), outcome, Text(result.message))
    Console(highlight=False).print(table)


if __name__ == "__main__":
    app(prog_name="python -m gpu_worker.conformance")
