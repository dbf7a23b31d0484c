"""Which kinds of parallelism exist here: pure Ulysses, in one group. Torch-free, so all else is refused before it loads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

from contracts.errors import ConfigurationError

STRICT: Final = "strict"


class UnsupportedParallelismError(ConfigurationError, NotImplementedError):
    """Raised for a kind of parallelism other than pure Ulysses."""


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """What a deployment says about parallelism. All but the first two fields have one value that is accepted.

    Args:
        ulysses_degree: ranks that share a sequence; None for as many as were started.
        sequence_parallel_size: the same in other words; None follows.
        ring_degree, allgather_degree: other ways to share a sequence: 1.
        ulysses_mode: `strict`, heads and tokens in equal shares.
        ulysses_a2a_permute: other layouts of the exchange: False.
        pipeline_parallel_size, tensor_parallel_size, data_parallel_size, cfg_parallel_size, vae_patch_parallel_size: 1.
        use_hsdp, enable_expert_parallel: False.

    Raises:
        UnsupportedParallelismError: anything but pure Ulysses; names the field.
        ConfigurationError: a degree is no integer >= 1.
    """

    ulysses_degree: int | None = None
    sequence_parallel_size: int | None = None
    ring_degree: int = 1
    allgather_degree: int = 1
    ulysses_mode: str = STRICT
    ulysses_a2a_permute: bool = False
    pipeline_parallel_size: int = 1
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    cfg_parallel_size: int = 1
    vae_patch_parallel_size: int = 1
    use_hsdp: bool = False
    enable_expert_parallel: bool = False

    @classmethod
    def from_mapping(cls, config: Mapping[str, Any]) -> ParallelConfig:
        """From raw settings; ConfigurationError naming one that does not exist."""
        known = [entry.name for entry in fields(cls)]
        for name in config:
            if name not in known:
                raise ConfigurationError(
                    f"there is no setting {name!r:.80} of parallelism; known: {', '.join(known)}",
                    field=str(name)[:80],
                )
        return cls(**config)

    def __post_init__(self) -> None:
        for entry in fields(self)[2:]:
            found = getattr(self, entry.name)
            if type(found) is not type(entry.default) or found != entry.default:
                raise UnsupportedParallelismError(
                    f"only pure Ulysses sequence parallelism is supported: {entry.name} must be {entry.default!r}, "
                    f"got {found!r:.80}",
                    field=entry.name,
                )
        for name in ("ulysses_degree", "sequence_parallel_size"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigurationError(f"{name} must be an integer >= 1, got {value!r:.80}", field=name)
        if self.sequence_parallel_size not in {None, self.ulysses_degree}:
            raise UnsupportedParallelismError(
                f"only pure Ulysses sequence parallelism is supported: sequence_parallel_size "
                f"{self.sequence_parallel_size} must equal ulysses_degree {self.ulysses_degree}",
                field="sequence_parallel_size",
            )

    def check_started(self, started: int) -> None:
        """ConfigurationError where another number of processes was started for this worker."""
        if self.ulysses_degree not in {None, started}:
            raise ConfigurationError(
                f"ulysses_degree {self.ulysses_degree} needs as many processes of this worker, {started} run: "
                f"torchrun --nproc-per-node {self.ulysses_degree} -m gpu_worker ...",
                field="ulysses_degree",
            )
