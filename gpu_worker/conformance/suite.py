"""Runs the checks, one after the other, and says how each went."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from gpu_worker.conformance import failure_checks, memory, output_checks, session_checks
from gpu_worker.conformance.bench import Bench
from gpu_worker.conformance.subject import NotApplicableError, Subject, ViolationError


class Outcome(StrEnum):
    """How a check went."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_APPLICABLE = "not applicable"
    NOT_RUN = "not run"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One check.

    Args:
        name: what was checked.
        outcome: how it went.
        message: what the check asks if it passed, otherwise why not.
    """

    name: str
    outcome: Outcome
    message: str

    def to_dict(self) -> dict[str, Any]:
        """The form that `--json` prints."""
        return {"name": self.name, "outcome": str(self.outcome), "message": self.message}


@dataclass(frozen=True, slots=True)
class Check:
    """A function that raises ViolationError, and the checks without which its answer would mean nothing."""

    run: Callable[[Bench], None]
    needs: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.run.__name__

    @property
    def asks(self) -> str:
        return " ".join((self.run.__doc__ or "").split())


SPEC: Final = "spec"
_SPEC_ASKS: Final = "The pipeline can be built, implements the protocol, and costs what plans are made with."

CHECKS: Final = (
    Check(output_checks.identity),
    Check(output_checks.finite_output),
    Check(output_checks.determinism),
    Check(session_checks.binding),
    Check(output_checks.rolling_window),
    Check(output_checks.prompt_switch, ("determinism",)),
    Check(output_checks.step_execution, ("determinism",)),
    Check(session_checks.reset, ("determinism",)),
    Check(session_checks.release, ("determinism",)),
    Check(session_checks.interleaving, ("determinism",)),
    Check(session_checks.eviction, ("determinism", "release", "interleaving")),
    Check(failure_checks.failure, ("rolling_window", "determinism", "release", "interleaving")),
    Check(failure_checks.hooks),
    Check(memory.memory),
)


def check_names() -> tuple[str, ...]:
    """Every check, in the order in which they run."""
    return (SPEC, *(check.name for check in CHECKS))


def passed(results: Iterable[CheckResult]) -> bool:
    """Whether no check failed."""
    return not any(result.outcome is Outcome.FAILED for result in results)


def run_conformance(subject: Subject) -> list[CheckResult]:
    """Puts a pipeline through every check; raises nothing that the pipeline raises."""
    pipeline, first = _build(subject)
    results = [first]
    if first.outcome is Outcome.FAILED:
        return results + [CheckResult(check.name, Outcome.NOT_RUN, f"needs {SPEC}") for check in CHECKS]
    failed: set[str] = set()
    for check in CHECKS:
        missing = failed.intersection(check.needs)
        if missing:
            result = CheckResult(check.name, Outcome.NOT_RUN, f"needs {', '.join(sorted(missing))}")
        else:
            result, pipeline = _run(check, subject, pipeline)
        if result.outcome is Outcome.FAILED:
            failed.add(check.name)
        results.append(result)
    return results


def _build(subject: Subject) -> tuple[object | None, CheckResult]:
    try:
        pipeline = subject.build()
        spec = Bench(subject, pipeline, SPEC).spec
        if subject.planned_spec is not None and subject.planned_spec(dict(subject.config)) != spec:
            raise ViolationError("the spec that plans are made with is not the pipeline's own")
    except Exception as error:  # noqa: BLE001 - a pipeline may raise anything, and that is the result
        return None, CheckResult(SPEC, Outcome.FAILED, _told(error))
    return pipeline, CheckResult(SPEC, Outcome.PASSED, _SPEC_ASKS)


def _run(check: Check, subject: Subject, pipeline: object | None) -> tuple[CheckResult, object | None]:
    """How a check went, and the pipeline for the next one: None after a failure, to be built anew. Whatever state it
    is in then belongs to the fault that was found."""
    try:
        pipeline = subject.build() if pipeline is None else pipeline
        check.run(Bench(subject, pipeline, check.name))
    except NotApplicableError as reason:
        return CheckResult(check.name, Outcome.NOT_APPLICABLE, str(reason)), pipeline
    except Exception as error:  # noqa: BLE001 - a pipeline may raise anything, and that is the result
        return CheckResult(check.name, Outcome.FAILED, _told(error)), None
    return CheckResult(check.name, Outcome.PASSED, check.asks), pipeline


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, ViolationError) else f"{type(error).__name__}: {error}"
