"""The sketch of a single-branch pipeline from the published page, given a transformer and a forward.

Spec, binding and hooks are as they stand there. What is added: a tiny causal transformer with register tokens, one
pass over scratch and one that commits, and a tone of the world that goes from chunk to chunk.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import torch

from gpu_worker import (
    ARDiffusionCrossAttentionKVSpec,
    ARDiffusionKVBranchSpec,
    ARDiffusionKVCacheSpec,
    ARDiffusionKVState,
    ARDiffusionRequest,
    DiffusionOutput,
)


class TinyTransformer:
    """Two layers of self-attention over paged KV, with cross-attention to the text."""

    num_layers = 2
    tp_local_kv_heads = 2
    head_size = 8
    tokens_per_latent_frame = 4
    sliding_window_frames = 6
    sink_frames = 3
    max_register_tokens = 5

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        generator = torch.Generator().manual_seed(11)
        dim = self.tp_local_kv_heads * self.head_size
        shape = (self.num_layers, 5, dim, dim)
        self.weights = (torch.randn(shape, generator=generator) / dim**0.5).to(device, dtype)
        self.registers = torch.randn(1, self.max_register_tokens, dim, generator=generator).to(device, dtype)
        self.dim = dim

    def heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (self.tp_local_kv_heads, self.head_size))

    def text_kv(self, text: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for q, k, v, *_ in self.weights:
            yield self.heads(text @ k), self.heads(text @ v @ q)

    def __call__(self, x: torch.Tensor, handles: list, text: list) -> torch.Tensor:
        """x [1, T, D], one handle and one text cache a layer -> [1, T, D]."""
        x = torch.cat((x, self.registers), dim=1)
        frames = x.shape[1] - self.max_register_tokens
        for (wq, wk, wv, wo, wc), handle, words in zip(self.weights, handles, text, strict=True):
            n = torch.nn.functional.layer_norm(x, (self.dim,))
            q, k, v = (self.heads(n @ w) for w in (wq, wk, wv))
            seen = handle.write_and_attend(q, k[:, :frames], v[:, :frames], k[:, frames:], v[:, frames:])
            x = x + seen.flatten(-2) @ wo
            picked = torch.nn.functional.scaled_dot_product_attention(
                self.heads(x @ wc).transpose(1, 2), words["k"].transpose(1, 2), words["v"].transpose(1, 2)
            )
            x = x + picked.transpose(1, 2).flatten(-2)
        return x[:, :frames]


@dataclass
class ModelState:
    """What the model itself keeps of a session."""

    prompt: str | None
    tone: float = 0.0


class WorldPipeline:
    text_length = 4

    def __init__(
        self, *, device: torch.device, dtype: torch.dtype, config: Mapping[str, Any] | None = None
    ) -> None:
        self.transformer = TinyTransformer(device, dtype)
        self.model_states: dict[str, ModelState] = {}
        self.current_ar_state: ARDiffusionKVState | None = None

    def ar_diffusion_kv_cache_spec(self) -> ARDiffusionKVCacheSpec:
        return ARDiffusionKVCacheSpec(
            num_layers=self.transformer.num_layers,
            num_kv_heads=self.transformer.tp_local_kv_heads,
            head_size=self.transformer.head_size,
            tokens_per_frame=self.transformer.tokens_per_latent_frame,
            frames_per_block=3,
            window_frames=self.transformer.sliding_window_frames,
            sink_frames=self.transformer.sink_frames,
            kv_branches=(ARDiffusionKVBranchSpec("main", 0),),
            cross_attention=(ARDiffusionCrossAttentionKVSpec("text", self.text_length),),
            max_scratch_tokens_per_branch=self.transformer.max_register_tokens,
            session_capacity=1,
        )

    @contextmanager
    def bind_ar_diffusion_state(self, session_id: str, state: ARDiffusionKVState) -> Iterator[None]:
        self.current_ar_state = state
        try:
            yield
        finally:
            self.current_ar_state = None

    def reset_ar_diffusion_session(self, session_id: str) -> None:
        self.model_states.pop(session_id, None)

    def close_ar_diffusion_session(self, session_id: str) -> None:
        self.model_states.pop(session_id, None)

    # -------------------------------------------------------------------------------------------- the forward

    def forward(self, request: ARDiffusionRequest) -> DiffusionOutput:
        tick, kv = request.tick, self.current_ar_state
        assert tick is not None
        assert kv is not None
        state = self.model_states.get(tick.session_id) or ModelState(None)
        self.use_prompt(kv, state, tick.prompt)
        latents = self.denoise(kv, self.noise(request.generator) + state.tone)
        self.model_states[tick.session_id] = ModelState(tick.prompt, float(latents.mean()))
        return DiffusionOutput(
            payload={"latents": latents},
            metadata={
                "ar_diffusion": {
                    "session_id": tick.session_id,
                    "request_id": tick.request_id,
                    "chunk_index": tick.chunk_index,
                    "applied_event_ids": list(tick.applied_event_ids),
                }
            },
        )

    def use_prompt(self, kv: ARDiffusionKVState, state: ModelState, prompt: str | None) -> None:
        if kv.is_cross_attention_populated("main", "text") and state.prompt == prompt:
            return
        generator = torch.Generator().manual_seed(crc32((prompt or "").encode()))
        text = torch.randn(1, self.text_length, self.transformer.dim, generator=generator)
        text = text.to(self.transformer.device, self.transformer.dtype)
        kv.populate_cross_attention("main", "text", self.transformer.text_kv(text))

    def noise(self, generator: torch.Generator | None) -> torch.Tensor:
        shape = (1, 3 * self.transformer.tokens_per_latent_frame, self.transformer.dim)
        drawn = torch.randn(shape, generator=generator, device=self.transformer.device)
        return drawn.to(self.transformer.dtype)

    def denoise(self, kv: ARDiffusionKVState, latents: torch.Tensor) -> torch.Tensor:
        for commit in (False, True):
            handles = kv.get_kv_caches("main", seq_len=latents.shape[1], commit_current=commit)
            kv.prepare_paged_context("main", extra_tokens=self.transformer.max_register_tokens)
            predicted = self.transformer(latents, handles, kv.get_cross_attention_kv("main", "text"))
            kv.commit_paged_context("main")
            latents = predicted if not commit else latents
        return latents
