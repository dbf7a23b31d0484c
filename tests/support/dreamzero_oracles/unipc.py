"""Flow-matching UniPC (order 2, bh2, clean prediction) from its formulas, in NumPy float64, as two plain functions."""

import math
from collections.abc import Generator

import numpy as np


def levels(steps: int, shift: float) -> list[float]:
    """The lattice of a thousand noise levels, cut into steps, shifted; 0 at the end."""
    alphas = np.linspace(1, 1 / 1000, 1000)[::-1]
    lattice = 1 - alphas
    cut = np.linspace(lattice.max(), lattice.min(), steps + 1)[:-1]
    return [*(shift * cut / (1 + (shift - 1) * cut)), 0.0]


def log_snr(sigma: float) -> float:
    return math.inf if sigma == 0 else math.log(1 - sigma) - math.log(sigma)


def solve(r: float, hh: float, order: int) -> np.ndarray:
    """The corrector's weights: one row a power of r, the last column is for r = 1."""
    if order == 1:
        return np.array([0.5])
    big_b = math.expm1(hh)
    phi = big_b / hh - 1
    rows, b = [], []
    for power in range(order):
        rows.append([r**power, 1.0])
        b.append(phi * math.factorial(power + 1) / big_b)
        phi = phi / hh - 1 / math.factorial(power + 2)
    return np.linalg.solve(np.array(rows), np.array(b))


def move(
    x: np.ndarray,
    s: float,
    t: float,
    m0: np.ndarray,
    *,
    before: tuple[float, np.ndarray] | None,
    m_t: np.ndarray | None,
) -> np.ndarray:
    """From level s to t. `before` (level, m) raises the order to 2; with `m_t` it is a correction."""
    h = log_snr(t) - log_snr(s)
    a_t, hh = 1 - t, -h
    big_b = math.expm1(hh)
    moved = t / s * x - a_t * big_b * m0
    r, d1 = 0.0, np.zeros_like(m0)
    if before is not None:
        r = (log_snr(before[0]) - log_snr(s)) / h
        d1 = (before[1] - m0) / r
    if m_t is None:
        return moved - a_t * big_b * 0.5 * d1 if before is not None else moved
    rho = solve(r, hh, 1 if before is None else 2)
    return moved - a_t * big_b * (rho[:-1].sum() * d1 + rho[-1] * (m_t - m0))


def walk(sigmas: list[float], x: np.ndarray) -> Generator[np.ndarray, np.ndarray, None]:
    """Gives the sample of every level, the last one included; is sent the flow of all but the last."""
    steps = len(sigmas) - 1
    clean: list[np.ndarray] = []
    orders: list[int] = []
    last = x
    for i in range(steps):
        flow = yield x
        m = x - sigmas[i] * flow
        if i > 0:
            before = (sigmas[i - 2], clean[i - 2]) if orders[-1] == 2 else None
            x = move(last, sigmas[i - 1], sigmas[i], clean[i - 1], before=before, m_t=m)
        clean.append(m)
        orders.append(min(2, steps - i, i + 1))
        last = x
        before = (sigmas[i - 1], clean[i - 1]) if orders[-1] == 2 else None
        x = move(last, sigmas[i], sigmas[i + 1], m, before=before, m_t=None)
    yield x


def run(sigmas: list[float], x: np.ndarray, flows: list[np.ndarray]) -> list[np.ndarray]:
    """The sample after every step, for flows that are given."""
    steps = walk(sigmas, x)
    next(steps)
    return [steps.send(flow) for flow in flows]
