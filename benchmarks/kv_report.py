"""The report of `bench_kv.py` for people: tables, and a plot in text or as a picture."""

from __future__ import annotations

import math
import os
import platform
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw
from rich.console import Console
from rich.table import Table

_BAR = 40


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    return {
        "cpu": _processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 1),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"


def show(report: dict[str, Any]) -> None:
    """Prints the report."""
    console = Console(highlight=False)
    made_on = report["machine"]
    console.print(
        f"{made_on['cpu']} ({made_on['instructions']}), {made_on['threads']} thread(s), load {made_on['load']}, "
        f"{made_on['system']}, Python {made_on['python']}, torch {made_on['torch']}"
    )
    console.print(f"{report['rounds']} interleaved rounds, {report['tokens_per_frame']} tokens a frame\n")
    times = Table("", "median µs", "middle half")
    for name, figures in report["times"].items():
        low, high = figures["quartiles_us"]
        times.add_row(name, f"{figures['median_us']:,}", f"{low:,} to {high:,}")
    console.print(times)
    ratios = Table("ratio within a round", "median", "target")
    for name, value in report["ratios"].items():
        low, high = report["targets"].get(name, (None, None))
        ratios.add_row(
            name, f"{value:.3f}", "" if high is None else f"{low} to {high}" if low else f"at most {high}"
        )
    console.print(ratios)
    allocated = report["allocated_by_100_chunks_of_book_keeping"]
    console.print(
        f"100 chunks of book-keeping: {allocated['torch_operators']} torch operators, "
        f"{allocated['python_blocks_kept']} Python objects kept\n"
    )
    console.print("a chunk whose past is recomputed / a paged one (logarithmic)")
    history = report["recomputed_over_paged_by_chunks"]
    for chunks, value in history.items():
        console.print(f"{chunks:>5} chunks  {'#' * _length(value, history, _BAR):<{_BAR}}  {value:.1f}")


def _length(value: float, values: dict[str, float], longest: int) -> int:
    top = math.log(max(2.0, *values.values()))
    return max(1, round(longest * math.log(max(1.0, value)) / top))


def draw_history(values: dict[str, float], path: Path) -> None:
    """Writes the plot as a PNG."""
    width, height, left, base = 640, 360, 60, 300
    picture = Image.new("RGB", (width, height), "white")
    pen = ImageDraw.Draw(picture)
    pen.text((left, 16), "one chunk, its past recomputed / paged (logarithmic)", fill="black")
    step = (width - 2 * left) // len(values)
    for number, (chunks, value) in enumerate(values.items()):
        x, top = left + number * step + step // 4, base - _length(value, values, 230)
        pen.rectangle((x, top, x + step // 2, base), fill=(70, 110, 180))
        pen.text((x, top - 14), f"{value:.1f} x", fill="black")
        pen.text((x, base + 8), f"{chunks} chunks", fill="black")
    pen.line((left, base, width - left, base), fill="black")
    picture.save(path)
