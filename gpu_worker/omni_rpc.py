"""Reset and close of sessions in the workers of an AsyncOmni engine: the caller's side, and the workers'."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Protocol

from contracts.errors import InvalidArgumentError, InvalidTypeError, SessionError
from contracts.identity import check_text_id

RESET_METHOD: Final = "reset_ar_diffusion_session"
CLOSE_METHOD: Final = "close_ar_diffusion_session"
DEFAULT_TIMEOUT_S: Final = 30.0


class CallableEngine(Protocol):
    """What the lifecycle asks of the engine."""

    def collective_rpc(
        self, *, method: str, timeout: float, args: tuple[Any, ...], stage_ids: list[int]
    ) -> Any:
        """Calls a method of every worker of these stages; returns, or awaits, their results."""
        ...


class ARDiffusionOmniLifecycle:
    """Releases sessions in every worker of some stages.

    Args:
        engine: the engine.
        stage_ids: stages whose workers hold sessions.
        timeout_s: of one call.

    Raises:
        InvalidArgumentError: stages or timeout; names the field.
        InvalidTypeError: the engine calls no workers.
    """

    def __init__(
        self, engine: CallableEngine, stage_ids: Sequence[int], *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> None:
        if not callable(getattr(engine, "collective_rpc", None)):
            raise InvalidTypeError(f"{type(engine).__name__} has no collective_rpc()", field="engine")
        self._engine = engine
        self._stage_ids = _check_stage_ids(stage_ids)
        self._timeout_s = _check_timeout(timeout_s)

    async def reset_session(self, session_id: str) -> None:
        """Has a session start again; SessionError unless every worker did so."""
        await self._call(RESET_METHOD, session_id)

    async def close_session(self, session_id: str) -> None:
        """Has a session released; SessionError unless every worker did so."""
        await self._call(CLOSE_METHOD, session_id)

    async def _call(self, method: str, session_id: str) -> None:
        results = self._engine.collective_rpc(
            method=method,
            timeout=self._timeout_s,
            args=(check_text_id(session_id, "session_id"),),
            stage_ids=list(self._stage_ids),
        )
        if inspect.isawaitable(results):
            results = await results
        answers = list(_answers(results, method))
        if not answers or not all(answers):
            raise SessionError(f"{method} is not supported by every selected worker", field="stage_ids")


class ARDiffusionSessionMethods:
    """The methods that the lifecycle calls, for a worker that holds a runner.

    Args:
        runner: has `reset_session` and `close_session`, if it keeps sessions at all.
    """

    def __init__(self, runner: object) -> None:
        self._runner = runner

    def reset_ar_diffusion_session(self, session_id: str) -> bool:
        """Has a session start again; False where the runner keeps none."""
        return self._delegate("reset_session", session_id)

    def close_ar_diffusion_session(self, session_id: str) -> bool:
        """Releases a session; False where the runner keeps none."""
        return self._delegate("close_session", session_id)

    def _delegate(self, name: str, session_id: str) -> bool:
        check_text_id(session_id, "session_id")
        method = getattr(self._runner, name, None)
        if not callable(method):
            return False
        method(session_id)
        return True


def _answers(results: object, method: str) -> Iterator[bool]:
    """The bools in what came back, however deep; SessionError for a part that reports an error."""
    if isinstance(results, bool):
        yield results
    elif isinstance(results, BaseException):
        raise SessionError(f"{method} failed: {type(results).__name__}: {results}") from results
    elif isinstance(results, Mapping):
        if results.get("error") is not None:
            raise SessionError(f"{method} failed: {results['error']}")
        if results.get("supported") is False:
            yield False
        yield from _answers(results.get("result"), method)
    elif isinstance(results, list | tuple):
        for result in results:
            yield from _answers(result, method)


def _check_stage_ids(stage_ids: object) -> tuple[int, ...]:
    if isinstance(stage_ids, str | bytes) or not isinstance(stage_ids, Sequence) or not stage_ids:
        raise InvalidArgumentError("stage_ids must be a list that is not empty", field="stage_ids")
    for stage_id in stage_ids:
        if not isinstance(stage_id, int) or isinstance(stage_id, bool) or stage_id < 0:
            raise InvalidArgumentError(
                f"stage_ids must be integers of at least 0, got {stage_id!r:.40}", field="stage_ids"
            )
    return tuple(stage_ids)


def _check_timeout(timeout_s: object) -> float:
    is_number = isinstance(timeout_s, int | float) and not isinstance(timeout_s, bool)
    if not is_number or not 0 < timeout_s < math.inf:  # type: ignore[operator]
        raise InvalidArgumentError(
            f"timeout_s must be a positive number of seconds, got {timeout_s!r:.40}", field="timeout_s"
        )
    return float(timeout_s)  # type: ignore[arg-type]
