"""The transformer bound to a chunk and a past, paged or contiguous, and whole rollouts of either."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from contracts.errors import InvalidArgumentError, KVStateError
from gpu_worker.kv.state import ARDiffusionKVState
from gpu_worker.models.lingbot_world.attention import TextKV
from gpu_worker.models.lingbot_world.contiguous import ContiguousKV
from gpu_worker.models.lingbot_world.sampler import DMDBlock, FlowModel
from gpu_worker.models.lingbot_world.schedule import DMDSchedule
from gpu_worker.models.lingbot_world.spec import BRANCH, TEXT
from gpu_worker.models.lingbot_world.transformer import CausalLingBotWorldTransformer3DModel, ChunkInputs


def publish_prompt(
    transformer: CausalLingBotWorldTransformer3DModel, kv: ARDiffusionKVState, text: torch.Tensor
) -> None:
    """Makes `text` [1, tokens, text_dim] the session's prompt: cross-attention is rebuilt, the rest of the past stays.

    The old prompt is gone first. If this fails there is none, which the next tick sees.
    """
    kv.clear_cross_attention(BRANCH, TEXT)
    kv.populate_cross_attention(BRANCH, TEXT, transformer.text_kv(text))


class PagedFlow:
    """A `FlowModel` over a session's pages.

    Args:
        transformer: the model.
        kv: the session's KV, its prompt published.
        chunk: from `prepare_chunk`; it must start where the session's past ends.
    """

    def __init__(
        self, transformer: CausalLingBotWorldTransformer3DModel, kv: ARDiffusionKVState, chunk: ChunkInputs
    ) -> None:
        self._transformer = transformer
        self._kv = kv
        self._chunk = chunk

    def __call__(self, model_input: torch.Tensor, timestep: float, *, update_cache: bool) -> torch.Tensor:
        """One pass; see `FlowModel`."""
        chunk, kv = self._chunk, self._kv
        if chunk.shape.batch != 1:
            raise KVStateError(
                f"paged KV holds one world, the batch has {chunk.shape.batch}", field="latents"
            )
        frames, rows, columns = chunk.shape.grid(self._transformer.config.patch_size)
        page, start_frame = kv.adapter(BRANCH).chunk_size, kv.adapter(BRANCH).absolute_frames
        if rows * columns != page:
            raise KVStateError(
                f"a latent frame has {rows * columns} tokens, the session's pages hold {page}",
                field="latents",
            )
        if start_frame != chunk.start_frame:
            raise KVStateError(
                f"the chunk starts at frame {chunk.start_frame}, the session's past ends at {start_frame}",
                field="start_frame",
            )
        text = [(layer["k"], layer["v"]) for layer in kv.get_cross_attention_kv(BRANCH, TEXT)]
        handles = kv.get_kv_caches(BRANCH, seq_len=frames * page, commit_current=update_cache)
        kv.prepare_paged_context(BRANCH)
        flow: torch.Tensor = self._transformer(model_input, timestep, chunk=chunk, kv=handles, text=text)
        kv.commit_paged_context(BRANCH)
        return flow


class ContiguousFlow:
    """A `FlowModel` over the contiguous reference.

    Args:
        transformer: the model.
        kv: the rollout's past.
        chunk: from `prepare_chunk`.
        text: K and V of the prompt, one pair a layer.
    """

    def __init__(
        self,
        transformer: CausalLingBotWorldTransformer3DModel,
        kv: ContiguousKV,
        chunk: ChunkInputs,
        text: Sequence[TextKV],
    ) -> None:
        self._transformer = transformer
        self._kv = kv
        self._chunk = chunk
        self._text = text

    def __call__(self, model_input: torch.Tensor, timestep: float, *, update_cache: bool) -> torch.Tensor:
        """One pass; see `FlowModel`."""
        chunk = self._chunk
        layers = self._kv.begin(chunk.start_frame, chunk.shape.frames, update_cache=update_cache)
        flow: torch.Tensor = self._transformer(model_input, timestep, chunk=chunk, kv=layers, text=self._text)
        self._kv.end()
        return flow


def rollout(
    transformer: CausalLingBotWorldTransformer3DModel,
    flow_of: Callable[[ChunkInputs], FlowModel],
    *,
    camera: torch.Tensor,
    condition: torch.Tensor,
    schedule: DMDSchedule,
    generator: torch.Generator,
    reuse_last_step_kv: bool = False,
) -> torch.Tensor:
    """A whole clip, block after block, by the steps that a tick takes.

    Args:
        transformer: the model.
        flow_of: binds it to one chunk.
        camera: folded rays [1, 384, F, h, w] of the clip.
        condition: [1, 20, F, h, w] of the clip.
        schedule: noise levels.
        generator: random state of the whole clip.
        reuse_last_step_kv: see `DMDBlock`.

    Returns:
        Clean latents [1, 16, F, h, w], float32.
    """
    block, frames = transformer.config.num_frames_per_block, camera.shape[2]
    if frames % block or frames == 0 or condition.shape[2] != frames:
        raise InvalidArgumentError(
            f"camera and condition must have the same whole blocks of {block} frames, "
            f"got {frames} and {condition.shape[2]}",
            field="camera",
        )
    clips = []
    for start in range(0, frames, block):
        part = slice(start, start + block)
        chunk = transformer.prepare_chunk(camera[:, :, part], start)
        made = DMDBlock(
            flow_of(chunk), condition[:, :, part], schedule, generator, reuse_last_step_kv=reuse_last_step_kv
        )
        clips.append(made.run())
    return torch.cat(clips, dim=2)
