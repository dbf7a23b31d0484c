"""A world of your own in one file: one attention layer over paged KV, walked with w a s d, coloured by the prompt."""

from contextlib import contextmanager

import gpu_worker
from contracts.lingbot import CAMERA_TRACK, parse_action_frames
from contracts.tick import METADATA_KEY, ARDiffusionChunkMetadata

FRAMES, SIDE, HEADS, HEAD_SIZE, WORDS = 3, 12, 2, 16, 4
TOKENS, DIM = SIDE * SIDE, HEADS * HEAD_SIZE


def kv_spec(config):
    """What a session costs. Planning asks this too, so torch is imported only where the model is built."""
    return gpu_worker.ARDiffusionKVCacheSpec(
        num_layers=1, num_kv_heads=HEADS, head_size=HEAD_SIZE, tokens_per_frame=TOKENS, frames_per_block=FRAMES,
        window_frames=config.get("window_frames", 6), sink_frames=3, session_capacity=16,
        kv_branches=(gpu_worker.ARDiffusionKVBranchSpec("main", 0),),
        cross_attention=(gpu_worker.ARDiffusionCrossAttentionKVSpec("text", WORDS),),
    )  # fmt: skip


class MyWorld:
    def __init__(self, *, device, dtype, config):
        import torch

        self.torch, self.device, self.dtype, self.config = torch, device, dtype, config
        weights = torch.randn(4, DIM, DIM, generator=torch.Generator().manual_seed(3)) / DIM**0.5
        self.qkv, self.paint = weights.to(device, dtype).split([3, 1])
        self.kv, self.worlds = None, {}  # worlds: session id -> (place, prompt)

    def ar_diffusion_kv_cache_spec(self):
        return kv_spec(self.config)

    @contextmanager
    def bind_ar_diffusion_state(self, session_id, state):  # noqa: ARG002 - the state knows its session
        self.kv = state
        try:
            yield
        finally:
            self.kv = None  # ours during the call only

    def close_ar_diffusion_session(self, session_id):
        self.worlds.pop(session_id, None)

    reset_ar_diffusion_session = close_ar_diffusion_session

    def forward(self, request):
        torch, nn, kv, tick = self.torch, self.torch.nn.functional, self.kv, request.tick
        place, prompt = self.worlds.get(tick.session_id, ((0.0, 0.0), None))
        waves, place = self.walk(place, tick.controls)  # [T, DIM]
        noise = torch.randn(waves.shape, generator=request.generator, device=self.device)
        x = (waves.to(self.device) + noise / 6).to(self.dtype)
        if tick.prompt != prompt or not kv.is_cross_attention_populated("main", "text"):
            letters = torch.Generator().manual_seed(sum(map(ord, tick.prompt or "")))
            k, v = torch.randn(2, 1, WORDS, HEADS, HEAD_SIZE, generator=letters).to(self.device, self.dtype)
            kv.populate_cross_attention("main", "text", [(k, v)])  # one pair a layer
        (text,) = kv.get_cross_attention_kv("main", "text")
        (layer,) = kv.get_kv_caches("main", seq_len=FRAMES * TOKENS, commit_current=True)
        kv.prepare_paged_context("main")
        q, k, v = (x @ self.qkv).view(3, 1, -1, HEADS, HEAD_SIZE)
        seen = layer.write_and_attend(q, k, v)  # [1, T, HEADS, HEAD_SIZE]
        kv.commit_paged_context("main")  # later chunks see these frames
        mood = nn.scaled_dot_product_attention(*(part.transpose(1, 2) for part in (q, text["k"], text["v"])))
        x = x + seen.flatten(-2)[0] + mood.transpose(1, 2).flatten(-2)[0]
        colours = torch.sigmoid(2 * x @ self.paint[0, :, :3]).T.view(1, 3, FRAMES, SIDE, SIDE).float()
        pictures = 255 * nn.interpolate(colours, (4 * FRAMES, 96, 96), mode="trilinear")[0]
        self.worlds[tick.session_id] = (place, tick.prompt)
        metadata = {METADATA_KEY: ARDiffusionChunkMetadata.from_tick(tick).to_dict()}
        return gpu_worker.DiffusionOutput({"latents": x}, pictures.byte().permute(1, 2, 3, 0), metadata)

    def walk(self, place, controls):
        held = [parse_action_frames(c.data, FRAMES) for c in controls if c.track == CAMERA_TRACK]
        waves, (x, y), side = [], place, self.torch.linspace(0, 2, SIDE)
        for keys in held[0] if held else ((),) * FRAMES:
            x, y = x + 0.1 * (("d" in keys) - ("a" in keys)), y + 0.1 * (("s" in keys) - ("w" in keys))
            ground = self.torch.cartesian_prod(side + y, side + x).unsqueeze(-1)  # what this frame looks at
            waves.append((ground * self.torch.linspace(1, 4, DIM // 2)).sin().flatten(1))
        return self.torch.cat(waves), (x, y)
