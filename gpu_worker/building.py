"""What goes wrong while a model is built, as what it is to whoever starts a worker: a model or settings that don't work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from contracts.errors import ConfigurationError, InvalidArgumentError, InvalidTypeError


@contextmanager
def told_as_configuration(model: str) -> Iterator[None]:
    """Errors of a model's factory and of its spec become ConfigurationError, with the model's name.

    What a model raises for bad settings is one of these builtin kinds. Anything else is a fault in it, or the device's,
    and passes unchanged, with its traceback.
    """
    try:
        yield
    except ConfigurationError:
        raise
    except (InvalidArgumentError, InvalidTypeError) as error:
        raise ConfigurationError(f"model {model!r}: {error.message}", field=error.field) from error
    except (ImportError, LookupError, OSError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"model {model!r} can't be built: {type(error).__name__}: {error}", field="model"
        ) from error
