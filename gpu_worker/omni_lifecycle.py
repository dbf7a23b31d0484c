"""Reset and close of sessions in an Omni engine's workers: the calling side, and the workers' side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Protocol

from contracts.errors import InvalidArgumentError, SessionError

RESET: Final = "reset_ar_diffusion_session"
CLOSE: Final = "close_ar_diffusion_session"


class RPCClient(Protocol):
    """The part of `AsyncOmni` that reaches its workers."""

    async def collective_rpc(
        self,
        *,
        method: str,
        timeout: float | None,  # noqa: ASYNC109 - the engine's own spelling
        args: tuple[Any, ...],
        stage_ids: list[int],
    ) -> Any:
        """Calls a method of every worker of the stages; returns what they answered."""
        ...


class ARDiffusionWorkerLifecycle:
    """Releases sessions in the workers of some stages.

    Args:
        rpc_client: the `AsyncOmni`.
        stage_ids: the AR-Diffusion stages; integers >= 0, at least one, else InvalidArgumentError.
        timeout: seconds that a call may take; None for the engine's own limit.
    """

    def __init__(
        self, rpc_client: RPCClient, *, stage_ids: Sequence[int], timeout: float | None = None
    ) -> None:
        self._client = rpc_client
        self._stage_ids = _checked_stages(stage_ids)
        self._timeout = timeout

    async def reset_session(self, session_id: str) -> None:
        """Has every worker release a session that starts again; SessionError unless all of them did."""
        await self._call(RESET, session_id)

    async def close_session(self, session_id: str) -> None:
        """Has every worker release a session; SessionError unless all of them did."""
        await self._call(CLOSE, session_id)

    async def _call(self, method: str, session_id: str) -> None:
        answers = await self._client.collective_rpc(
            method=method, timeout=self._timeout, args=(session_id,), stage_ids=list(self._stage_ids)
        )
        done = list(_verdicts(method, answers))
        if not done or not all(done):
            raise SessionError(f"{method} is not supported by every selected worker: {answers!r:.200}")


def _checked_stages(stage_ids: Sequence[object]) -> list[int]:
    kept = [item for item in stage_ids if isinstance(item, int) and not isinstance(item, bool) and item >= 0]
    if not kept or len(kept) != len(stage_ids):
        raise InvalidArgumentError(
            f"stage_ids must be integers >= 0, at least one, got {stage_ids!r:.80}", field="stage_ids"
        )
    return kept


def _verdicts(method: str, answer: object) -> Iterator[bool]:
    """Every bool in the answers, however they are nested; an answer that says why not is raised."""
    if isinstance(answer, bool):
        yield answer
    elif isinstance(answer, Mapping):
        if answer.get("supported") is False or answer.get("error"):
            raise SessionError(f"{method} failed: {answer.get('error') or 'not supported'}")
        yield from _verdicts(method, answer.get("result"))
    elif isinstance(answer, list | tuple):
        for item in answer:
            yield from _verdicts(method, item)


class ARDiffusionWorkerExtension:
    """The workers' side, for an engine whose workers lack it: `worker_extension_cls` of the AR-Diffusion stage.

    It expects the runner as `self.model_runner`. Both methods return False where that keeps no sessions.
    """

    model_runner: Any

    def reset_ar_diffusion_session(self, session_id: str) -> bool:
        """Releases a session that starts again."""
        return self._release("reset_session", session_id)

    def close_ar_diffusion_session(self, session_id: str) -> bool:
        """Releases a session."""
        return self._release("close_session", session_id)

    def _release(self, method: str, session_id: object) -> bool:
        if not isinstance(session_id, str) or not session_id.strip():
            raise InvalidArgumentError(
                f"session_id must be a string that is not blank, got {session_id!r:.80}", field="session_id"
            )
        release = getattr(self.model_runner, method, None)
        if not callable(release):
            return False
        release(session_id)
        return True
