"""Prompts to embeddings: UMT5 over 512 tokens, zero where there is padding. The last few prompts are remembered."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Final

import torch

from contracts.errors import ConfigurationError, InvalidArgumentError
from gpu_worker.models.lingbot_world.spec import TEXT_TOKENS
from gpu_worker.models.lingbot_world.weights import Checkpoint, fill_module

REMEMBERED: Final = 4
TOKENIZER_FILE: Final = "tokenizer.json"


def normalised(prompt: object) -> str:
    """A prompt with single spaces only; InvalidArgumentError unless it is text, and not blank."""
    text = " ".join(prompt.split()) if isinstance(prompt, str) else ""
    if not text:
        raise InvalidArgumentError("prompt must be a non-empty text", field="prompt")
    return text


class TextEncoder:
    """Embeds prompts.

    Args:
        model: transformers' `UMT5EncoderModel`.
        tokenizer: of its vocabulary.
        tokens: length of every embedding.
    """

    def __init__(self, model: Any, tokenizer: Any, tokens: int = TEXT_TOKENS) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._tokens = tokens
        self._remembered: OrderedDict[tuple[str, int, torch.dtype], torch.Tensor] = OrderedDict()

    @classmethod
    def load(
        cls, checkpoint: Checkpoint, text_dim: int, *, device: torch.device, dtype: torch.dtype
    ) -> TextEncoder:
        """From a checkpoint; ConfigurationError naming what does not fit."""
        try:
            from transformers import T5TokenizerFast, UMT5Config, UMT5EncoderModel
        except ImportError as error:
            raise ConfigurationError(
                f"lingbot-world needs the extra worldline[lingbot]: {error}", field="model"
            ) from error
        try:
            config = UMT5Config.from_dict(dict(checkpoint.config("text_encoder")))
            with torch.device("meta"):
                model = UMT5EncoderModel(config)
        except ConfigurationError:
            raise
        except Exception as error:  # noqa: BLE001 - the library raises whatever its checks do
            raise ConfigurationError(
                f"text_encoder/config.json is no configuration of UMT5: {type(error).__name__}",
                field="text_encoder/config.json",
            ) from None
        if config.d_model != text_dim:
            raise ConfigurationError(
                f"the text encoder's d_model must be {text_dim}, the checkpoint says {config.d_model!r:.80}",
                field="d_model",
            )
        fill_module(
            model,
            checkpoint.weights("text_encoder"),
            "the text encoder",
            device=device,
            dtype=dtype,
            tied={"encoder.embed_tokens.weight": "shared.weight"},
        )
        if not (checkpoint.folder("tokenizer") / TOKENIZER_FILE).is_file():
            # The library would make one up, which knows no word.
            raise ConfigurationError(f"tokenizer/{TOKENIZER_FILE} is missing", field="tokenizer")
        try:
            tokenizer = T5TokenizerFast.from_pretrained(
                str(checkpoint.folder("tokenizer")), local_files_only=True
            )
        except Exception:  # noqa: BLE001 - the library raises whatever its parsers do, with the path in it
            raise ConfigurationError("the tokenizer is missing or damaged", field="tokenizer") from None
        if len(tokenizer) > config.vocab_size:  # such a token would be read beyond the table's end
            raise ConfigurationError(
                f"the tokenizer has {len(tokenizer)} tokens, the text encoder {config.vocab_size}",
                field="vocab_size",
            )
        return cls(model, tokenizer)

    @torch.no_grad()
    def __call__(self, prompt: object) -> torch.Tensor:
        """[1, 512, text_dim]; padding is zero. Not to be written into: it is remembered."""
        text = normalised(prompt)
        key = (text, self._tokens, self._model.dtype)
        known = self._remembered.pop(key, None)
        if known is None:
            known = self._embed(text)
        self._remembered[key] = known  # now the youngest
        if len(self._remembered) > REMEMBERED:
            self._remembered.popitem(last=False)
        return known

    def _embed(self, text: str) -> torch.Tensor:
        batch = self._tokenizer(
            [text],
            padding="max_length",
            max_length=self._tokens,
            truncation=True,
            add_special_tokens=True,
            return_attention_mask=True,
            return_tensors="pt",
        )
        device = self._model.device
        mask = batch["attention_mask"].to(device, non_blocking=True)
        hidden: torch.Tensor = self._model(
            batch["input_ids"].to(device, non_blocking=True), mask
        ).last_hidden_state
        return hidden.masked_fill(mask.unsqueeze(-1) == 0, 0)  # a product would keep what is no number
