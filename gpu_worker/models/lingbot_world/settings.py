"""Settings of a deployment, and the layout that its checkpoint must have. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from contracts.errors import ConfigurationError, InvalidArgumentError
from gpu_worker.models.lingbot_world.config import LingBotTransformerConfig, check_degree
from gpu_worker.models.lingbot_world.schedule import parse_flow_shift
from gpu_worker.models.lingbot_world.spec import LingBotSpecSettings, VaeGeometry, tokens_per_frame


@dataclass(frozen=True, slots=True)
class LingBotTopology:
    """What the checkpoint must be; the defaults are the published one."""

    transformer: LingBotTransformerConfig = field(default_factory=LingBotTransformerConfig)
    vae: VaeGeometry = field(default_factory=VaeGeometry)


@dataclass(frozen=True, slots=True)
class LingBotSettings:
    """The pipeline's own settings.

    Args:
        checkpoint: the local directory.
        flow_shift: of requests that name none; None leaves it to the checkpoint.
        lingbot_action_root: the folder beneath which requests may name images and trajectories; None trusts none.
        cost: what changes the cost of a session: `ar_diffusion_height`, `ar_diffusion_width`, `session_capacity`.
    """

    checkpoint: object
    flow_shift: float | None
    lingbot_action_root: str | None
    cost: LingBotSpecSettings

    @classmethod
    def from_mapping(cls, config: Mapping[str, Any]) -> LingBotSettings:
        """From raw settings; ConfigurationError naming one that does not exist or is out of range."""
        rest = dict(config)
        checkpoint = rest.pop("checkpoint", None)
        shift = rest.pop("flow_shift", None)
        root = rest.pop("lingbot_action_root", None)
        for name in ("dtype", "ulysses_degree"):  # the worker's own
            if name in rest:
                option = name.replace("_", "-")
                raise ConfigurationError(f"{name} is a setting of the worker: --{option}", field=name)
        try:
            shift = None if shift is None else parse_flow_shift(shift)
        except InvalidArgumentError as error:
            raise ConfigurationError(error.message, field=error.field) from None
        if root is not None and not isinstance(root, str):
            raise ConfigurationError("lingbot_action_root must be a path", field="lingbot_action_root")
        return cls(checkpoint, shift, root, LingBotSpecSettings.from_mapping(rest))

    def check_degree(self, degree: int, transformer: LingBotTransformerConfig) -> None:
        """ConfigurationError unless `degree` ranks can share heads and tokens equally."""
        cost = self.cost
        frame_tokens = tokens_per_frame(cost.ar_diffusion_height, cost.ar_diffusion_width, transformer)
        try:
            check_degree(degree, transformer, transformer.num_frames_per_block * frame_tokens)
        except InvalidArgumentError as error:
            raise ConfigurationError(error.message, field=error.field) from None
