"""Logs of every process: structured, on stderr, those of libraries included, so that stdout stays for results."""

from __future__ import annotations

import logging
import sys
from typing import Any, Final

import structlog
from structlog.dev import plain_traceback
from structlog.tracebacks import ExceptionDictTransformer

from contracts.errors import ConfigurationError

# Without the values of variables: to lay those out takes a second, during which nothing else runs, and they are what
# users said.
_AS_DICT: Final = ExceptionDictTransformer(show_locals=False)


def configure_logging(level: str, log_format: str) -> None:
    """Sends everything to stderr.

    Args:
        level: debug, info, warning or error; ConfigurationError for another.
        log_format: "console" for people, "json" for machines.
    """
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise ConfigurationError(
            f"log_level {level!r:.40} is none of debug, info, warning, error", field="log_level"
        )
    steps: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    as_text: list[Any] = [
        structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=plain_traceback)
    ]
    as_json: list[Any] = [
        structlog.processors.ExceptionRenderer(_AS_DICT),
        structlog.processors.JSONRenderer(),
    ]
    last = as_json if log_format == "json" else as_text
    structlog.configure(
        processors=[*steps, *last],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=steps,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
        )
    )
    logging.basicConfig(level=number, handlers=[handler], force=True)
    # At info it tells of each callback.
    logging.getLogger("transitions").setLevel(max(number, logging.WARNING))
