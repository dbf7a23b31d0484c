"""UMT5 under the checkpoint's names, and prompts to token ids and embeddings."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

from torch import nn

from contracts.errors import ConfigurationError
from gpu_worker.models.dreamzero.config import TextGeometry
from gpu_worker.models.lingbot_world.text import TextEncoder, normalised

TIED: Final = {"encoder.embed_tokens.weight": "shared.weight"}

_WHOLE: Final = {
    "shared.weight": "token_embedding.weight",
    "encoder.final_layer_norm.weight": "norm.weight",
}
_IN_BLOCK: Final = {
    "layer.0.SelfAttention.q": "attn.q",
    "layer.0.SelfAttention.k": "attn.k",
    "layer.0.SelfAttention.v": "attn.v",
    "layer.0.SelfAttention.o": "attn.o",
    "layer.0.SelfAttention.relative_attention_bias": "pos_embedding.embedding",
    "layer.0.layer_norm": "norm1",
    "layer.1.DenseReluDense.wi_0": "ffn.gate.0",
    "layer.1.DenseReluDense.wi_1": "ffn.fc1",
    "layer.1.DenseReluDense.wo": "ffn.fc2",
    "layer.1.layer_norm": "norm2",
}
_BLOCK: Final = re.compile(r"encoder\.block\.(\d+)\.(.+)\.weight")


def published_name(name: str) -> str:
    """What the checkpoint calls a parameter of transformers' `UMT5EncoderModel`."""
    found = _BLOCK.fullmatch(name)
    return _WHOLE[name] if found is None else f"blocks.{found[1]}.{_IN_BLOCK[found[2]]}.weight"


def text_model(geometry: TextGeometry, dim: int) -> nn.Module:
    """transformers' `UMT5EncoderModel` of that layout and width, where torch puts modules at the moment."""
    try:
        from transformers import UMT5Config, UMT5EncoderModel
    except ImportError as error:
        raise ConfigurationError(
            f"dreamzero needs the extra worldline[dreamzero]: {error}", field="model"
        ) from error
    config = UMT5Config(
        vocab_size=geometry.vocabulary,
        d_model=dim,
        d_kv=geometry.head_dim,
        d_ff=geometry.ffn_dim,
        num_layers=geometry.layers,
        num_heads=geometry.heads,
        relative_attention_num_buckets=geometry.buckets,
        relative_attention_max_distance=geometry.max_distance,
        feed_forward_proj="gated-gelu",
    )
    model: nn.Module = UMT5EncoderModel(config)
    return model


class DreamZeroText(TextEncoder):
    """Embeds prompts [1, tokens, text_dim], and tells their token ids."""

    @classmethod
    def open(cls, model: Any, tokenizer: Path, vocabulary: int, tokens: int) -> DreamZeroText:
        """With the tokenizer of a folder; ConfigurationError where it is none, or speaks more words than the model.

        Args:
            model: a loaded `UMT5EncoderModel`.
            tokenizer: the folder.
            vocabulary: tokens that the model knows.
            tokens: length of every embedding.
        """
        from transformers import T5TokenizerFast

        try:
            opened = T5TokenizerFast.from_pretrained(str(tokenizer), local_files_only=True)
        except Exception:  # noqa: BLE001 - the library raises whatever its parsers do, with the path in it
            raise ConfigurationError("the tokenizer is missing or damaged", field="tokenizer") from None
        if len(opened) > vocabulary:  # such a token would be read beyond the table's end
            raise ConfigurationError(
                f"the tokenizer has {len(opened)} tokens, the text encoder {vocabulary}", field="vocab_size"
            )
        return cls(model, opened, tokens)

    def token_ids(self, prompt: object) -> tuple[int, ...]:
        """The ids that a prompt is embedded from, without padding; two prompts of the same ids are the same."""
        batch = self._tokenizer(
            [normalised(prompt)], max_length=self._tokens, truncation=True, add_special_tokens=True
        )
        return tuple(batch["input_ids"][0])
