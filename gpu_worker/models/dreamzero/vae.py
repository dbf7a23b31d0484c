"""The Wan VAE under the names of the checkpoint, which are the model's own and not diffusers'."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

from gpu_worker.models.lingbot_world.spec import VaeGeometry
from gpu_worker.models.lingbot_world.vae import wan_vae_class

_PLAIN: Final = (
    (r"quant_conv", "conv1"),
    (r"post_quant_conv", "conv2"),
    (r"(encoder|decoder)\.conv_in", r"\1.conv1"),
    (r"(encoder|decoder)\.norm_out", r"\1.head.0"),
    (r"(encoder|decoder)\.conv_out", r"\1.head.2"),
    (r"(encoder|decoder)\.mid_block\.resnets\.0", r"\1.middle.0"),
    (r"(encoder|decoder)\.mid_block\.attentions\.0", r"\1.middle.1"),
    (r"(encoder|decoder)\.mid_block\.resnets\.1", r"\1.middle.2"),
    (r"encoder\.down_blocks\.(\d+)", r"encoder.downsamples.\1"),
)
_UPWARDS: Final = re.compile(r"decoder\.up_blocks\.(\d+)\.(resnets|upsamplers)\.(\d+)\.(.+)")
_IN_RESIDUAL: Final = {
    "norm1": "residual.0",
    "conv1": "residual.2",
    "norm2": "residual.3",
    "conv2": "residual.6",
    "conv_shortcut": "shortcut",
}


def published_names(geometry: VaeGeometry) -> Callable[[str], str]:
    """What the checkpoint calls a parameter of diffusers' `AutoencoderKLWan` of that layout."""
    resnets = geometry.res_blocks + 1

    def published(name: str) -> str:
        upwards = _UPWARDS.fullmatch(name)
        if upwards is not None:  # there, all stages are one list, each one's upsampling behind its blocks
            stage, kind, index, rest = upwards.groups()
            place = int(stage) * (resnets + 1) + (int(index) if kind == "resnets" else resnets)
            return f"decoder.upsamples.{place}.{_renamed(rest)}"
        for pattern, replacement in _PLAIN:
            found = re.fullmatch(rf"{pattern}\.(?P<rest>.+)", name)
            if found is not None:
                return f"{found.expand(replacement)}.{_renamed(found['rest'])}"
        return name

    return published


def _renamed(rest: str) -> str:
    first, dot, last = rest.partition(".")
    return _IN_RESIDUAL.get(first, first) + dot + last


def wan_vae(geometry: VaeGeometry) -> Any:
    """diffusers' `AutoencoderKLWan` of that layout, where torch puts modules at the moment."""
    return wan_vae_class().from_config(
        {
            "base_dim": geometry.base,
            "z_dim": geometry.z,
            "dim_mult": list(geometry.mult),
            "num_res_blocks": geometry.res_blocks,
            "temperal_downsample": list(geometry.temporal_downsample),
        }
    )
