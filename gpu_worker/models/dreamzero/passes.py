"""One forward of the transformer over a session's pages, of one CFG branch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from contracts.errors import KVStateError
from gpu_worker.kv.state import ARDiffusionKVState
from gpu_worker.models.dreamzero.attention import CrossKV
from gpu_worker.models.dreamzero.config import PATCH
from gpu_worker.models.dreamzero.spec import IMAGE, TEXT
from gpu_worker.models.dreamzero.transformer import DreamZeroTransformer, Flow, Timestep


@dataclass(frozen=True, slots=True, eq=False)
class Registers:
    """The actions and states beside the frames.

    Args:
        action: [1, A, max_action_dim], noisy, of the model's type.
        timestep: of the actions.
        state: [1, S, max_state_dim], of the model's type.
    """

    action: torch.Tensor
    timestep: Timestep
    state: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Frames:
    """The frames of one forward.

    Args:
        latents: [1, 16, F, h, w] of the model's type.
        condition: [1, 20, F, h, w] of the same frames.
        start_frame: absolute index of the first one; the branch's past must end there.
        timestep: of the frames.
    """

    latents: torch.Tensor
    condition: torch.Tensor
    start_frame: int
    timestep: Timestep


class PagedModel:
    """The transformer bound to a session's pages; text and image must be published.

    Args:
        transformer: the model.
        kv: the session's KV.
    """

    def __init__(self, transformer: DreamZeroTransformer, kv: ARDiffusionKVState) -> None:
        self._transformer = transformer
        self._kv = kv

    def prefill(self, branch: str, frames: Frames) -> None:
        """Leaves clean frames in the past of `branch`."""
        self._pass(branch, frames, None, commit=True)

    def denoise(self, branch: str, frames: Frames, registers: Registers) -> Flow:
        """The flow of noisy frames and actions; leaves nothing."""
        return self._pass(branch, frames, registers, commit=False)

    def _pass(self, branch: str, frames: Frames, registers: Registers | None, *, commit: bool) -> Flow:
        kv, model = self._kv, self._transformer.config.transformer
        tokens = self._tokens(branch, frames)
        text, image = self._cross(branch, TEXT), self._cross(branch, IMAGE)
        handles = kv.get_kv_caches(branch, seq_len=tokens, commit_current=commit)
        kv.prepare_paged_context(branch, extra_tokens=0 if registers is None else model.registers)
        flow: Flow = self._transformer(
            frames.latents,
            frames.condition,
            start_frame=frames.start_frame,
            video_timestep=frames.timestep,
            action=None if registers is None else registers.action,
            action_timestep=None if registers is None else registers.timestep,
            state=None if registers is None else registers.state,
            caches=handles,
            text_kv=text,
            image_kv=image,
        )
        kv.commit_paged_context(branch)
        return flow

    def _tokens(self, branch: str, frames: Frames) -> int:
        """Tokens of the frames; KVStateError unless they fit the branch's pages and follow its past."""
        adapter = self._kv.adapter(branch)
        _, rows, columns = PATCH
        count, height, width = frames.latents.shape[2:]
        page = (height // rows) * (width // columns)
        if page != adapter.chunk_size:
            raise KVStateError(
                f"a latent frame has {page} tokens, the session's pages hold {adapter.chunk_size}",
                field="latents",
            )
        if frames.start_frame != adapter.absolute_frames:
            raise KVStateError(
                f"the frames start at {frames.start_frame}, the past of branch {branch!r} ends at "
                f"{adapter.absolute_frames}",
                field="start_frame",
            )
        return count * page

    def _cross(self, branch: str, name: str) -> list[CrossKV]:
        return [(layer["k"], layer["v"]) for layer in self._kv.get_cross_attention_kv(branch, name)]
