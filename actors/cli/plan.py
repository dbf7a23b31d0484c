"""`worldline plan`: how many sessions fit on a device, before any weight is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from actors.capacity_report import COLUMNS, make_plan, plan_rows, plan_summary, plan_to_dict
from actors.cli.exit_codes import ExitCode
from actors.cli.options import JsonOption
from actors.cli.output import print_json, print_table
from actors.cli.parsing import parse_params
from actors.kv_specs import load_kv_fields
from contracts.assignments import parse_assignments
from contracts.errors import CapacityError, InvalidArgumentError
from contracts.kv_spec_json import DTYPE_BYTES, DTYPE_FIELD, kv_spec_from_dict, loads_kv_spec
from contracts.memory_size import parse_memory

DEFAULT_FRACTION: Final = 0.1


def plan(
    *,
    model: Annotated[str | None, typer.Option(help="An installed model.", show_default=False)] = None,
    spec: Annotated[
        Path | None,
        typer.Option(
            help="JSON file with the fields of a KV spec, and dtype; - is stdin.", show_default=False
        ),
    ] = None,
    memory: Annotated[
        str, typer.Option(help="Free memory of the device: bytes, 141GB or 80GiB.", show_default=False)
    ],
    fraction: Annotated[
        float, typer.Option(help="Share of it for further sessions, in (0, 1].")
    ] = DEFAULT_FRACTION,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="FIELD=VALUE",
            help="Another value of a field of the spec, or of dtype; repeatable.",
            show_default=False,
        ),
    ] = None,
    param: Annotated[
        list[str] | None,
        typer.Option(metavar="K=JSON", help="A setting of the model; repeatable.", show_default=False),
    ] = None,
    scratch_blocks: Annotated[
        int | None,
        typer.Option(
            envvar="AR_DIFFUSION_KV_SCRATCH_BLOCKS_PER_BRANCH",
            help="At least so many scratch pages a branch.",
            show_default=False,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Print how many sessions of a model fit on a device, and what each part takes. Loads no weights."""
    available_bytes = parse_memory(memory)
    # A value is JSON, and dtype may do without quotes.
    changes = parse_assignments(set_ or [], "set", form="FIELD=VALUE", words=(DTYPE_FIELD,))
    fields = _described(model, spec, param or [], dtype=changes.get(DTYPE_FIELD))
    chosen, dtype = kv_spec_from_dict({**fields, **changes})
    try:
        found = make_plan(
            chosen,
            available_bytes=available_bytes,
            fraction=fraction,
            itemsize=DTYPE_BYTES[dtype],
            scratch_blocks_minimum=scratch_blocks,
        )
    except CapacityError as error:
        if not as_json:
            raise
        print_json({"error": _cannot_fit(error)})
        raise typer.Exit(ExitCode.BAD_CONFIGURATION) from None
    if as_json:
        print_json(plan_to_dict(found))
        return
    print_table(COLUMNS, plan_rows(found))
    for line in plan_summary(found):
        typer.echo(line)


def _described(
    model: str | None, file: Path | None, params: Sequence[str], *, dtype: object
) -> dict[str, Any]:
    """The spec as plain fields, from wherever it comes."""
    if (model is None) == (file is None):
        raise InvalidArgumentError("give either --model or --spec", field="model" if file else "spec")
    config = parse_params(params)
    if model is not None:
        return load_kv_fields(model, config, dtype)
    assert file is not None
    if config:
        raise InvalidArgumentError(
            "--param reaches a model; a file has no settings, use --set", field="param"
        )
    fields = loads_kv_spec(_read(file))
    if not isinstance(fields, dict):
        raise InvalidArgumentError(f"{file}: a spec is one JSON object", field="spec")
    return fields


def _read(file: Path) -> bytes:
    try:
        return typer.get_binary_stream("stdin").read() if str(file) == "-" else file.read_bytes()
    except OSError as error:
        raise InvalidArgumentError(f"{file}: {error.strerror}", field="spec") from None


def _cannot_fit(error: CapacityError) -> dict[str, Any]:
    return {
        "code": error.code,
        "message": error.message,
        "available_bytes": error.available_bytes,
        "required_bytes": error.required_bytes,
    }
