"""The demo's pictures: the world as a moving picture, and a contact sheet with the keys that were held."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from PIL import Image, ImageDraw, ImageFont

from actors.demo.drive import DemoChunk, Options

FRAMES_PER_SECOND: Final = 12
_SIDE: Final = 384
_TILE: Final = 232
_GAP: Final = 16
_MARGIN: Final = 28
_LABEL: Final = 40
_HEAD: Final = 72
_COLUMNS: Final = 4
_CAP_SIDE: Final = 28

_PAPER: Final = (250, 249, 246)
_INK: Final = (38, 38, 42)
_FAINT: Final = (142, 140, 136)
_CAP: Final = (255, 255, 255)
_MARK: Final = (176, 74, 120)

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


def write_pictures(made: Sequence[DemoChunk], options: Options, folder: Path) -> dict[str, Path]:
    """Writes both; empty for a model that makes no pixel frames."""
    if any(item.frames is None for item in made):
        return {}
    folder.mkdir(parents=True, exist_ok=True)
    files = {"moving picture": folder / "world.webp", "contact sheet": folder / "contact_sheet.png"}
    _write_moving(made, files["moving picture"])
    contact_sheet(made, options).save(files["contact sheet"])
    return files


def _write_moving(made: Sequence[DemoChunk], path: Path) -> None:
    pictures = [
        Image.fromarray(frame).resize((_SIDE, _SIDE), Image.Resampling.LANCZOS)
        for item in made
        if item.frames is not None
        for frame in item.frames
    ]
    pictures[0].save(
        path,
        save_all=True,
        append_images=pictures[1:],
        duration=round(1000 / FRAMES_PER_SECOND),
        loop=0,
        quality=90,
        method=2,
    )


def contact_sheet(made: Sequence[DemoChunk], options: Options) -> Image.Image:
    """The middle frame of each chunk, in reading order."""
    rows = -(-len(made) // _COLUMNS)
    width = 2 * _MARGIN + _COLUMNS * _TILE + (_COLUMNS - 1) * _GAP
    height = 2 * _MARGIN + _HEAD + rows * (_TILE + _LABEL) + (rows - 1) * _GAP
    sheet = Image.new("RGB", (width, height), _PAPER)
    draw = ImageDraw.Draw(sheet)
    draw.text((_MARGIN, _MARGIN - 6), "worldline", fill=_INK, font=_font(26))
    about = f"model {options.model}    seed {options.seed}    {len(made)} chunks    “{made[0].prompt}”"
    draw.text((_MARGIN, _MARGIN + 32), about, fill=_FAINT, font=_font(15))
    for number, item in enumerate(made):
        left = _MARGIN + (number % _COLUMNS) * (_TILE + _GAP)
        top = _MARGIN + _HEAD + (number // _COLUMNS) * (_TILE + _LABEL + _GAP)
        _draw_chunk(sheet, draw, item, left, top)
    return sheet


def _draw_chunk(sheet: Image.Image, draw: ImageDraw.ImageDraw, item: DemoChunk, left: int, top: int) -> None:
    assert item.frames is not None
    picture = Image.fromarray(item.frames[len(item.frames) // 2])
    picture = picture.resize((_TILE, _TILE), Image.Resampling.LANCZOS)
    sheet.paste(picture, (left, top), _rounded((_TILE, _TILE), 10))
    middle = top + _TILE + _LABEL // 2
    draw.text((left + 2, middle), str(item.chunk.chunk_index), fill=_FAINT, font=_font(16), anchor="lm")
    _draw_keys(sheet, item.keys, left + _TILE, middle)
    if item.switched:
        _draw_switch(sheet, item.prompt, left, top)


def _draw_keys(sheet: Image.Image, keys: Sequence[str], right: int, middle: int) -> None:
    """Key caps, the last one flush right."""
    step = _CAP_SIDE + 6
    left = right - len(keys) * step + 6
    for number, key in enumerate(keys):
        sheet.paste(_key_cap(key), (left + number * step, middle - _CAP_SIDE // 2))


def _key_cap(key: str) -> Image.Image:
    """One cap, drawn four times as large so that its corners are smooth."""
    side = 4 * _CAP_SIDE
    cap = Image.new("RGB", (side, side), _PAPER)
    draw = ImageDraw.Draw(cap)
    draw.rounded_rectangle((3, 3, side - 4, side - 4), radius=26, fill=_CAP, outline=_INK, width=7)
    draw.text((side / 2, side / 2), key.upper(), fill=_INK, font=_font(56), anchor="mm")
    return cap.resize((_CAP_SIDE, _CAP_SIDE), Image.Resampling.LANCZOS)


def _draw_switch(sheet: Image.Image, prompt: str, left: int, top: int) -> None:
    """A band over the foot of the picture: the prompt that begins here."""
    height = 30
    band = Image.new("RGBA", (_TILE, height), (*_MARK, 225))
    text, font = f"“{prompt}”", _font(14)
    ImageDraw.Draw(band).text((_TILE / 2, height / 2), text, fill=(255, 255, 255), font=font, anchor="mm")
    mask = _rounded((_TILE, _TILE), 10).crop((0, _TILE - height, _TILE, _TILE))
    under = sheet.crop((left, top + _TILE - height, left + _TILE, top + _TILE)).convert("RGBA")
    sheet.paste(Image.alpha_composite(under, band).convert("RGB"), (left, top + _TILE - height), mask)


def _rounded(size: tuple[int, int], radius: int) -> Image.Image:
    """A mask with round corners, drawn four times as large so that they are smooth."""
    large = Image.new("L", (size[0] * 4, size[1] * 4), 0)
    ImageDraw.Draw(large).rounded_rectangle(
        (0, 0, large.width - 1, large.height - 1), radius=radius * 4, fill=255
    )
    return large.resize(size, Image.Resampling.LANCZOS)


def _font(size: int) -> Font:
    return ImageFont.load_default(size)
