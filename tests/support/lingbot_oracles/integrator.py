"""The camera integrator, from its formulas, in plain NumPy float64."""

import numpy as np


def walk(frames: list[str], pose: np.ndarray | None = None, pitch: int = 0) -> tuple[np.ndarray, int]:
    """Poses [F, 4, 4] of held keys ("wl" holds two), and the pitch in degrees at the end."""
    rotation = np.eye(3) if pose is None else pose[:3, :3].copy()
    position = np.zeros(3) if pose is None else pose[:3, 3].copy()
    poses = []
    for keys in frames:
        held = {key: int(key in keys) for key in "wasdijkl"}
        tilt = 4 * (held["i"] - held["k"])
        if abs(pitch + tilt) > 85:
            tilt = 0
        pitch += tilt
        a, b = np.deg2rad(6 * (held["l"] - held["j"])), np.deg2rad(tilt)
        about_y = np.array([[np.cos(a), 0, np.sin(a)], [0, 1, 0], [-np.sin(a), 0, np.cos(a)]])
        about_x = np.array([[1, 0, 0], [0, np.cos(b), -np.sin(b)], [0, np.sin(b), np.cos(b)]])
        rotation = about_y @ rotation @ about_x
        ahead = np.array([rotation[0, 2], 0, rotation[2, 2]])
        right = np.array([rotation[0, 0], 0, rotation[2, 0]])
        ahead /= np.linalg.norm(ahead) + 1e-6
        right /= np.linalg.norm(right) + 1e-6
        position = position + 0.05 * (held["w"] - held["s"]) * ahead + 0.05 * (held["d"] - held["a"]) * right
        matrix = np.eye(4)
        matrix[:3, :3], matrix[:3, 3] = rotation, position
        poses.append(matrix)
    return np.stack(poses), pitch
