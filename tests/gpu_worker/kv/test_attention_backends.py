"""Which attention backends run where, and that those which read pages in place see what the gathered ones see."""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from contracts.errors import ConfigurationError
from contracts.kv_spec import ARDiffusionKVCacheSpec, resolve_kv_config
from gpu_worker.engine import load_engine
from gpu_worker.kv import backends
from gpu_worker.kv.attention import AttentionBackend, SdpaBackend, attend, read_visible
from gpu_worker.kv.backends import available_backends, make_attention_backend
from gpu_worker.kv.flash import FlashBackend
from gpu_worker.kv.flex import KEYS, FlexBackend, block_mask, covering_blocks
from gpu_worker.kv.metadata import PagedMetadata
from gpu_worker.runner import ARDiffusionModelRunner
from support.kv_cache import CPU, make_cache, make_state, tiny_spec
from support.kv_pipeline import RecordingPipeline, make_runner

CUDA = torch.device("cuda")
SPEC = tiny_spec(
    num_kv_heads=2, head_size=16, frames_per_block=2, window_frames=4, max_scratch_tokens_per_branch=5
)
PAGES_OF_256 = tiny_spec(num_kv_heads=2, head_size=16, tokens_per_frame=256)


def make(name: str, spec: ARDiffusionKVCacheSpec = SPEC, **changes: Any) -> AttentionBackend:
    values: dict[str, Any] = {"device": CPU, "dtype": torch.float32, **changes}
    return make_attention_backend(name, spec, resolve_kv_config(spec), **values)


@pytest.fixture
def capability(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Pretends a device of that compute capability, and none of the packages."""

    def pretend(major: int, **packages: Any) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (major, 0))
        for name in ("flash_attn", "flash_attn_interface"):
            module = ModuleType(name)
            if name in packages:
                module.flash_attn_with_kvcache = packages[name]  # type: ignore[attr-defined]
            monkeypatch.setitem(sys.modules, name, module)

    return pretend


# ---------------------------------------------------------------------------------------------------- choice


def test_torchs_own_runs_anywhere() -> None:
    assert isinstance(make("sdpa"), SdpaBackend)
    assert isinstance(make("sdpa", device=CUDA), SdpaBackend)


def test_an_unknown_backend_is_told_the_known_ones() -> None:
    with pytest.raises(ConfigurationError, match=r"'xformers'.*sdpa, flex, flash_attn") as caught:
        make("xformers")
    assert caught.value.field == "attention_backend"


@pytest.mark.parametrize("name", ["flex", "flash_attn"])
def test_a_backend_that_the_device_has_not_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"'{name}' can't run here: .*not cpu") as caught:
        make(name)
    assert caught.value.field == "attention_backend"


def test_flex_needs_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "find_spec", lambda _name: None)
    with pytest.raises(ConfigurationError, match="Triton is not installed"):
        make("flex", device=CUDA)
    monkeypatch.setattr(backends, "find_spec", lambda name: name)
    monkeypatch.setattr(torch, "compile", lambda function: function)
    assert make("flex", device=CUDA).name == "flex"


def test_the_newest_flash_attn_that_the_device_has_is_taken(capability: Any) -> None:
    both = {"flash_attn": lambda *_a, **_k: "two", "flash_attn_interface": lambda *_a, **_k: "three"}
    capability(9, **both)
    hopper = make("flash_attn", device=CUDA, dtype=torch.bfloat16)
    assert isinstance(hopper, FlashBackend)
    assert (hopper._kernel(), hopper._table) == ("three", "page_table")
    capability(8, **both)
    ampere = make("flash_attn", PAGES_OF_256, device=CUDA, dtype=torch.float16)
    assert isinstance(ampere, FlashBackend)
    assert (ampere._kernel(), ampere._table) == ("two", "block_table")


@pytest.mark.parametrize(
    ("device", "spec", "dtype", "why"),
    [
        ((9, ()), SPEC, torch.bfloat16, "installed"),
        ((8, ("flash_attn_interface",)), SPEC, torch.bfloat16, "installed"),
        ((9, ("flash_attn_interface",)), SPEC, torch.float32, "not torch.float32"),
        ((7, ("flash_attn",)), PAGES_OF_256, torch.float16, "compute capability 8"),
        ((8, ("flash_attn",)), SPEC, torch.float16, "tokens_per_frame is 16"),
        ((9, ("flash_attn_interface",)), tiny_spec(head_size=512), torch.float16, "head_size 512"),
    ],
)
def test_flash_attn_says_what_it_lacks(
    capability: Any,
    device: tuple[int, tuple[str, ...]],
    spec: ARDiffusionKVCacheSpec,
    dtype: torch.dtype,
    why: str,
) -> None:
    major, packages = device
    capability(major, **dict.fromkeys(packages, print))
    with pytest.raises(ConfigurationError, match=f"'flash_attn' can't run here: .*{why}"):
        make("flash_attn", spec, device=CUDA, dtype=dtype)


def test_staging_needs_the_backend_that_gathers() -> None:
    config = resolve_kv_config(SPEC, {"reuse_history_staging": True})
    for name in ("flex", "flash_attn"):
        with pytest.raises(ConfigurationError, match="reuse_history_staging"):
            make_attention_backend(name, SPEC, config, device=CUDA, dtype=torch.bfloat16)
    assert make_attention_backend("sdpa", SPEC, config, device=CPU, dtype=torch.float32).name == "sdpa"


def test_all_backends_are_listed_with_why_they_can_not_run() -> None:
    found = available_backends(SPEC, resolve_kv_config(SPEC), device=CPU, dtype=torch.float32)
    assert list(found) == ["sdpa", "flex", "flash_attn"]
    assert isinstance(found["sdpa"], SdpaBackend)
    assert "CUDA" in str(found["flex"])


def test_the_setting_reaches_the_pool_and_is_checked_before_anything_is_allocated() -> None:
    assert make_runner(RecordingPipeline(), attention_backend="sdpa").cache.attention.name == "sdpa"
    with pytest.raises(ConfigurationError, match="flex"):
        make_runner(RecordingPipeline(), attention_backend="flex")
    with pytest.raises(ConfigurationError, match="flash_attn"):
        load_engine("reference", available_bytes=1 << 28, attention_backend="flash_attn")


def test_the_backend_is_chosen_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    monkeypatch.setitem(backends._MAKERS, "sdpa", lambda *_arguments: made.append("sdpa") or SdpaBackend())
    runner: ARDiffusionModelRunner = make_runner(RecordingPipeline())
    assert made == ["sdpa"]
    runner.load()
    assert made == ["sdpa"]


# ---------------------------------------------------------------------------------------------------- what is seen


class Recorder:
    """A backend that attends to what torch's own would, and keeps what it was given."""

    name = "recorder"

    def __init__(self) -> None:
        self.calls: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, PagedMetadata, torch.Tensor]] = []

    def attend(
        self, q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, metadata: PagedMetadata
    ) -> torch.Tensor:
        out = SdpaBackend().attend(q, k_pages, v_pages, metadata)
        self.calls.append((q, k_pages.clone(), v_pages.clone(), metadata, out))
        return out


@pytest.fixture(scope="module")
def calls() -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, PagedMetadata, torch.Tensor]]:
    """Forwards of a rollout past its window: probes and commits, one and two frames, with and without extra tokens."""
    torch.manual_seed(0)
    state, recorder = make_state(SPEC, spare_pages=7), Recorder()
    state._cache.attention = recorder
    for call in range(12):
        frames, extra = 1 + call % 2, 5 if call % 3 == 0 else 0
        k, v = torch.randn(2, 1, frames * 16, 2, 16)
        q = torch.randn(1, frames * 16 + extra, 4, 16)
        more = torch.randn(1, extra, 2, 16) if extra else None
        (handle,) = state.get_kv_caches("main", seq_len=frames * 16, commit_current=call % 2 == 1)
        state.prepare_paged_context("main", extra_tokens=extra)
        handle.write_and_attend(q, k, v, more, more)
        state.commit_paged_context("main")
    assert len({metadata.num_visible for *_, metadata, _ in recorder.calls}) > 4
    return recorder.calls


# torch says that without compilation all scores are computed: that is what is wanted here.
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
def test_flex_sees_the_visible_tokens_where_they_lie(calls: Any) -> None:
    flex = FlexBackend(compiled=False)
    for q, k_pages, v_pages, metadata, expected in calls[::3] + calls[-2:]:
        torch.testing.assert_close(flex.attend(q, k_pages, v_pages, metadata), expected, atol=1e-5, rtol=1e-5)


def test_the_mask_of_flex_has_one_shape_for_the_whole_rollout(calls: Any) -> None:
    shapes = {
        tuple(part.shape)
        for _, k_pages, _, metadata, _ in calls
        for mask in [block_mask(metadata, 32, len(k_pages), CPU)]
        for part in (mask.kv_indices, mask.full_kv_indices)
        if metadata.extra_tokens == 0 and part is not None
    }
    assert len(shapes) == 1


@pytest.mark.parametrize(
    ("spans", "partly", "wholly"),
    [
        ([], [], []),
        ([(0, KEYS)], [], [0]),
        ([(1, KEYS)], [0], []),
        ([(0, KEYS + 1)], [1], [0]),
        ([(KEYS // 2, KEYS), (0, KEYS // 2)], [], [0]),
        ([(3 * KEYS, 5 * KEYS), (10, 20)], [0], [3, 4]),
    ],
)
def test_kernel_blocks_cover_the_spans(
    spans: list[tuple[int, int]], partly: list[int], wholly: list[int]
) -> None:
    assert covering_blocks(spans) == (partly, wholly)


@pytest.mark.parametrize("table", ["page_table", "block_table"])
def test_flash_attn_gets_pool_table_and_length(calls: Any, table: str) -> None:
    def kernel(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, **options: Any) -> torch.Tensor:
        """What the kernel is documented to do, written with a gather."""
        assert options["causal"] is False
        (length,) = options["cache_seqlens"].tolist()
        assert (options[table].dtype, options["cache_seqlens"].dtype) == (torch.int32, torch.int32)
        ids = options[table][0].long()
        k, v = (pages[ids].flatten(0, 1)[:length].unsqueeze(0) for pages in (k_cache, v_cache))
        return attend(q, k, v)

    backend = FlashBackend(kernel, table=table)
    for q, k_pages, v_pages, metadata, expected in calls:
        torch.testing.assert_close(
            backend.attend(q, k_pages, v_pages, metadata), expected, atol=1e-6, rtol=1e-6
        )


def test_one_page_run_is_a_view_and_several_are_one_copy() -> None:
    cache = make_cache(SPEC)
    pages = cache.k_pages[0]

    def metadata(*visible: int) -> PagedMetadata:
        return PagedMetadata(
            visible=visible,
            current=visible[-1:],
            extra=(),
            extra_tokens=0,
            block_size=16,
            retained_blocks=4,
            device=CPU,
        )

    together, apart = read_visible(pages, metadata(2, 3, 4)), read_visible(pages, metadata(4, 2, 3))
    assert together.data_ptr() == pages[2].data_ptr()
    assert apart.untyped_storage().data_ptr() != pages.untyped_storage().data_ptr()
    assert apart.is_contiguous()
