"""A toy arm in a plane: three joints, a gripper, two cameras. It knows nothing of worldline."""

import io
import math

import numpy as np
from PIL import Image, ImageDraw

JOINTS = 3
LENGTHS = (0.5, 0.4, 0.25)
LIMIT = 2.0
"""Radians that a joint turns to either side."""

FASTEST = 0.15
"""Radians that a joint turns within one action, at most."""

PICTURE = 96
COLOURS = ("#d1495b", "#00798c", "#edae49", "#30638e")


class Arm:
    """Where it is, and where it has been."""

    def __init__(self) -> None:
        self.angles = np.array([0.6, -0.9, 0.4])
        self.gripper = 0.0
        self.history = [np.append(self.angles, self.gripper)]

    def state(self) -> dict[str, list[float]]:
        """What its sensors say."""
        return {"joint_position": self.angles.tolist(), "gripper_position": [self.gripper]}

    def step(self, action: np.ndarray) -> None:
        """Turns towards the angles that an action asks for, as fast as it can, and grips."""
        wanted = np.clip(action[:JOINTS], -LIMIT, LIMIT)
        self.angles = self.angles + np.clip(wanted - self.angles, -FASTEST, FASTEST)
        self.gripper = float(np.clip(action[JOINTS], 0, 1))
        self.history.append(np.append(self.angles, self.gripper))

    def cameras(self) -> dict[str, bytes]:
        """PNG pictures: one from the side, one of what lies before the hand."""
        points = self._points()
        side = Image.new("RGB", (PICTURE, PICTURE), "#dde3ea")
        draw = ImageDraw.Draw(side)
        places = [(PICTURE * (0.5 + x / 2.6), PICTURE * (0.75 - y / 2.6)) for x, y in points]
        draw.line(places, fill="#30343f", width=6, joint="curve")
        for (x, y), colour in zip(places, COLOURS, strict=True):
            draw.ellipse((x - 4, y - 4, x + 4, y + 4), fill=colour)
        wrist = Image.new("RGB", (PICTURE, PICTURE), "#f4ead5")
        draw = ImageDraw.Draw(wrist)
        x, y = (
            PICTURE / 2 + 60 * (target - hand) for target, hand in zip((0.6, 0.4), points[-1], strict=True)
        )
        draw.ellipse((x - 14, PICTURE - y - 14, x + 14, PICTURE - y + 14), fill="#66a182")
        opening = 8 + 24 * (1 - self.gripper)
        for edge in (PICTURE / 2 - opening, PICTURE / 2 + opening):
            draw.line((edge, PICTURE, edge, PICTURE - 30), fill="#30343f", width=5)
        return {"side": _png(side), "wrist": _png(wrist)}

    def plot(self) -> Image.Image:
        """Angles and gripper over the actions applied so far."""
        width, height, border = 720, 360, 40
        image = Image.new("RGB", (width, height), "white")
        draw = ImageDraw.Draw(image)
        rows = np.array(self.history)
        draw.line((border, height / 2, width - 10, height / 2), fill="#c8c8c8")
        for column, name in enumerate([*(f"joint {joint}" for joint in range(JOINTS)), "gripper"]):
            xs = np.linspace(border, width - 10, len(rows))
            ys = height / 2 - rows[:, column] / LIMIT * (height / 2 - 20)
            draw.line(list(zip(xs.tolist(), ys.tolist(), strict=True)), fill=COLOURS[column], width=2)
            draw.text((border + 90 * column, 4), name, fill=COLOURS[column])
        draw.text((4, height / 2 - 6), "0 rad", fill="#606060")
        draw.text((width - 130, height - 16), f"{len(rows) - 1} actions", fill="#606060")
        return image

    def _points(self) -> list[tuple[float, float]]:
        """Base, two elbows, hand."""
        points, x, y, turned = [(0.0, 0.0)], 0.0, 0.0, math.pi / 2
        for angle, length in zip(self.angles, LENGTHS, strict=True):
            turned -= angle
            x, y = x + length * math.cos(turned), y + length * math.sin(turned)
            points.append((x, y))
        return points


def _png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()
