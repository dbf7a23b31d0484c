"""The causal diffusion transformer of LingBot World v2, with the names and shapes of its checkpoint.

A chunk is `prepare_chunk` once (camera and positions are the same in all its forwards) and five forwards. Text is
projected once a prompt by `text_kv`. The past is whatever the KV handles keep.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from contracts.errors import ConfigurationError, InvalidArgumentError
from gpu_worker.models.lingbot_world.attention import SelfAttentionKV, SequenceParallel, TextKV
from gpu_worker.models.lingbot_world.blocks import Block, CameraAffine, Head, patchify, unpatchify
from gpu_worker.models.lingbot_world.checks import (
    BlockShape,
    check_block,
    check_start_frame,
    expand_timestep,
)
from gpu_worker.models.lingbot_world.config import LingBotTransformerConfig, check_degree
from gpu_worker.models.lingbot_world.rope import Rotary, rotary
from gpu_worker.parallel.errors import ShardError


class UnknownWeightError(ConfigurationError, KeyError):
    """Raised for a weight whose name the model does not have."""


@dataclass(frozen=True, slots=True, eq=False)
class ChunkInputs:
    """What the forwards of one chunk share.

    Args:
        start_frame: absolute index of its first latent frame.
        shape: of its latents.
        table: rotary positions of its tokens.
        camera: one affine a block, of this worker's tokens.
    """

    start_frame: int
    shape: BlockShape
    table: Rotary
    camera: tuple[CameraAffine, ...]

    @property
    def camera_bytes(self) -> int:
        """Bytes of the camera modulation, which lives as long as the chunk."""
        return sum(part.nbytes for affine in self.camera for part in affine)


class CausalLingBotWorldTransformer3DModel(nn.Module):
    """Predicts the flow of one block of three latent frames from the noisy block, text, camera and past.

    Args:
        config: the topology.
        parallel: workers that share the sequence; None where this one has all of it.
    """

    def __init__(
        self, config: LingBotTransformerConfig | None = None, parallel: SequenceParallel | None = None
    ) -> None:
        super().__init__()
        self.config = config = LingBotTransformerConfig() if config is None else config
        self.parallel = parallel
        dim, (t, h, w) = config.dim, config.patch_size
        self.patch_embedding = nn.Conv3d(
            config.in_channels, dim, kernel_size=config.patch_size, stride=config.patch_size
        )
        self.patch_embedding_wancamctrl = nn.Linear(config.camera_channels * t * h * w, dim)
        self.c2ws_hidden_states_layer1 = nn.Linear(dim, dim)
        self.c2ws_hidden_states_layer2 = nn.Linear(dim, dim)
        self.text_embedding = nn.Sequential(
            nn.Linear(config.text_dim, dim), nn.GELU(approximate="tanh"), nn.Linear(dim, dim)
        )
        self.time_embedding = nn.Sequential(nn.Linear(config.freq_dim, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.time_projection = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.head = Head(config)
        self.requires_grad_(False).eval()

    # ------------------------------------------------------------------------------------------------ weights

    @classmethod
    def from_config(
        cls,
        config: Mapping[str, Any],
        *,
        pinned: LingBotTransformerConfig | None = None,
        parallel: SequenceParallel | None = None,
    ) -> CausalLingBotWorldTransformer3DModel:
        """A model without memory (on the meta device), to be filled by `load_weights`.

        Raises ConfigurationError naming a field of `config` that is not the pinned topology's.
        """
        topology = LingBotTransformerConfig.from_checkpoint(config, pinned)
        with torch.device("meta"):
            return cls(topology, parallel)

    def load_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], *, device: torch.device, dtype: torch.dtype
    ) -> set[str]:
        """Takes weights over, one by one, and returns their names; several calls may each bring a part.

        Raises:
            UnknownWeightError: the model has no weight of that name.
            ConfigurationError: a shape is wrong; names the weight.
        """
        shapes = {name: parameter.shape for name, parameter in self.named_parameters()}
        loaded = set()
        for name, tensor in weights:
            if name not in shapes:
                raise UnknownWeightError(f"the transformer has no weight {name!r:.120}", field=name[:120])
            if tensor.shape != shapes[name]:
                raise ConfigurationError(
                    f"weight {name} must have shape {list(shapes[name])}, got {list(tensor.shape)}",
                    field=name,
                )
            owner, _, attribute = name.rpartition(".")
            value = nn.Parameter(tensor.to(device=device, dtype=dtype), requires_grad=False)
            setattr(self.get_submodule(owner), attribute, value)
            loaded.add(name)
        return loaded

    def check_loaded(self) -> None:
        """ConfigurationError naming a weight that has no memory yet."""
        for name, parameter in self.named_parameters():
            if parameter.is_meta:
                raise ConfigurationError(f"weight {name} is missing", field=name)

    @property
    def dtype(self) -> torch.dtype:
        """Element type of the weights."""
        return self.patch_embedding.weight.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.patch_embedding.weight.device

    def compile_blocks(self, **options: Any) -> None:
        """Compiles the blocks (`options` as for `torch.compile`); all of them share one graph."""
        for block in self._blocks():
            block.compile(**options)

    # ------------------------------------------------------------------------------------------------ once a prompt

    def text_kv(self, text: torch.Tensor, cached: Sequence[TextKV | None] | None = None) -> Iterator[TextKV]:
        """K and V of every block's cross-attention, in order.

        Args:
            text: [B, tokens, text_dim], zero where padded; padding is attended to like any token.
            cached: what is there already; only layers that are None are projected.
        """
        if text.dim() != 3 or text.shape[2] != self.config.text_dim:
            raise InvalidArgumentError(
                f"text must have shape [B, tokens, {self.config.text_dim}], got {list(text.shape)}",
                field="text",
            )
        known = [None] * self.config.num_layers if cached is None else cached
        embedded: torch.Tensor | None = None
        for block, pair in zip(self._blocks(), known, strict=True):
            if pair is None:
                embedded = self.text_embedding(text.to(self.dtype)) if embedded is None else embedded
                yield block.cross_attn.project(embedded, self.parallel)
            else:
                yield pair

    # ------------------------------------------------------------------------------------------------ once a chunk

    def prepare_chunk(self, camera: torch.Tensor, start_frame: int) -> ChunkInputs:
        """What the forwards of a chunk share.

        Args:
            camera: folded rays [B, 384, 3, h, w], of the model's type and on its device.
            start_frame: absolute index of the first latent frame.
        """
        start_frame = check_start_frame(start_frame)
        config = self.config
        shape = check_block(
            "camera", camera, config.camera_channels, config, device=self.device, dtype=self.dtype
        )
        grid = shape.grid(config.patch_size)
        if self.parallel is not None:
            check_degree(self.parallel.degree, config, math.prod(grid))
        tokens = self._mine(self.patch_embedding_wancamctrl(patchify(camera, config.patch_size)), 1)
        tokens = tokens + self.c2ws_hidden_states_layer2(F.silu(self.c2ws_hidden_states_layer1(tokens)))
        cos, sin = rotary(
            start_frame,
            *grid,
            config.attention_head_dim,
            device=self.device,
            dtype=self.dtype,
        )
        return ChunkInputs(
            start_frame=start_frame,
            shape=shape,
            table=(self._mine(cos, 0), self._mine(sin, 0)),
            camera=tuple(block.camera_affine(tokens) for block in self._blocks()),
        )

    # ------------------------------------------------------------------------------------------------ one forward

    def forward(
        self,
        latents: torch.Tensor,
        timestep: float | torch.Tensor,
        *,
        chunk: ChunkInputs,
        kv: Sequence[SelfAttentionKV],
        text: Sequence[TextKV],
    ) -> torch.Tensor:
        """The flow of one block.

        Args:
            latents: [B, 36, 3, h, w] (noisy or clean latents, mask, image latents), of the model's type.
            timestep: 0 to 1000: a number, one a sample [B], or one a frame [B, 3].
            chunk: from `prepare_chunk`.
            kv: one handle a layer; the caller decides whether what they write stays.
            text: K and V of the prompt, one pair a layer.

        Returns:
            [B, 16, 3, h, w].
        """
        config = self.config
        shape = check_block(
            "latents", latents, config.in_channels, config, device=self.device, dtype=self.dtype
        )
        if shape != chunk.shape:
            raise InvalidArgumentError(f"latents are {shape}, the camera is {chunk.shape}", field="latents")
        for name, count in (("kv", len(kv)), ("text", len(text))):
            if count != config.num_layers:
                raise InvalidArgumentError(
                    f"{name} must have {config.num_layers} layers, got {count}", field=name
                )
        grid = shape.grid(config.patch_size)

        weight = self.patch_embedding.weight.flatten(1)  # the stride is the kernel, so a patch is one product
        x = self._mine(F.linear(patchify(latents, config.patch_size), weight, self.patch_embedding.bias), 1)

        embedding, projection = self._time(expand_timestep(timestep, shape, self.device))
        if self.parallel is not None:  # shares may split a frame, so modulation goes by the token
            frame_tokens = grid[1] * grid[2]
            embedding, projection = (
                self._mine(value.repeat_interleave(frame_tokens, dim=1), 1)
                for value in (embedding, projection)
            )
            self._check_shards(x, projection, chunk)
        projection = projection.float()

        layers = zip(self._blocks(), chunk.camera, kv, text, strict=True)
        for block, camera, past, words in layers:
            x = block(x, projection, chunk.table, camera, kv=past, text=words, parallel=self.parallel)

        values = self.head(x, embedding)
        if self.parallel is not None:  # after the head: 64 values a token travel instead of 5120
            values = self.parallel.gather(values)
        return unpatchify(values, grid, config.patch_size)

    def _time(self, timestep: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[B, F] -> the embedding [B, F, D], and its projection [B, F, 6, D]."""
        half = self.config.freq_dim // 2
        frequencies = 10_000.0 ** (-torch.arange(half, dtype=torch.float64, device=timestep.device) / half)
        angles = timestep.unsqueeze(-1) * frequencies
        embedding = self.time_embedding(torch.cat((angles.cos(), angles.sin()), dim=-1).to(self.dtype))
        return embedding, self.time_projection(embedding).unflatten(-1, (6, -1))

    @staticmethod
    def _check_shards(x: torch.Tensor, projection: torch.Tensor, chunk: ChunkInputs) -> None:
        """ShardError unless hidden state, modulation, camera and rotary tables are of the same tokens."""
        counts = {
            "hidden state": x.shape[1],
            "timestep": projection.shape[1],
            "rotary tables": len(chunk.table[0]),
            "camera": chunk.camera[0][0].shape[1],
        }
        if len(set(counts.values())) > 1:
            said = ", ".join(f"{name} {count}" for name, count in counts.items())
            raise ShardError(f"SP input hooks: the shards have different tokens: {said}", field="chunk")

    def _mine(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        return x if self.parallel is None else self.parallel.shard(x, dim)

    def _blocks(self) -> Iterator[Block]:
        for block in self.blocks:
            assert isinstance(block, Block)
            yield block
