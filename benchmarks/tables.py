"""A report as tables for people."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table


def show(report: dict[str, Any]) -> None:
    """Prints one benchmark's report."""
    console = Console(highlight=False)
    machine = report["machine"]
    libraries = ", ".join(f"{name} {version}" for name, version in machine["libraries"].items())
    console.print(f"{machine['cpu']}, {machine['cores']} cores (load {machine['load']}), {machine['system']}")
    console.print(
        f"Python {machine['python']} on {machine['event_loop']}, {machine['broker']} (append-only: {machine['append_only']})"
    )
    console.print(libraries)
    console.print(
        f"{report['rounds']} interleaved rounds, {report['operations_a_batch']} operations a batch\n"
    )
    console.print(_times(report["times"]))
    console.print(_ratios(report["ratios"], report["targets"]))
    if "traffic" in report:
        console.print(_traffic(report["traffic"]))
    for title in ("shares of a tick", "work of a chunk"):
        if title in report:
            console.print(_listed(title, report[title]))
    if "ms of an observation" in report:
        milliseconds = {name: f"{ms:g}" for name, ms in report["ms of an observation"].items()}
        console.print(_listed("ms of an observation", milliseconds))


def _times(times: dict[str, Any]) -> Table:
    table = Table("", "median µs", "middle half")
    for name, figures in times.items():
        low, high = figures["quartiles_us"]
        table.add_row(name, f"{figures['median_us']:,}", f"{low:,} to {high:,}")
    return table


def _ratios(ratios: dict[str, float], targets: dict[str, float]) -> Table:
    table = Table("ratio within a round", "median", "target")
    for name, value in ratios.items():
        bound = "at least" if name.startswith("rq") else "at most"
        table.add_row(name, f"{value:.2f}", f"{bound} {targets[name]}" if name in targets else "")
    return table


def _listed(title: str, values: dict[str, Any]) -> Table:
    table = Table(title, "")
    for name, value in values.items():
        table.add_row(name, f"{value:.1%}" if isinstance(value, float) else str(value))
    return table


def _traffic(traffic: dict[str, Any]) -> Table:
    table = Table("a tick", "count", "of")
    for role, counts in traffic["sent"].items():
        kinds = ", ".join(f"{name} {count:g}" for name, count in counts.items() if name != "round trips")
        table.add_row(f"{role}: round trips", f"{counts.get('round trips', 0):g}", kinds)
    calls = traffic["run_by_the_broker"]
    kinds = ", ".join(f"{name} {count:g}" for name, count in calls.items())
    table.add_row("broker: commands, in scripts too", f"{sum(calls.values()):g}", kinds)
    return table
