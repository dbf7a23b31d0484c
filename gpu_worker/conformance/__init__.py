"""Checks that any pipeline can be put through: does it keep the contract that sessions rely on?

    python -m gpu_worker.conformance MODEL
    run_conformance(Subject(factory))        # the same from a test of your own

`subject.py` says what is checked, `bench.py` drives it tick by tick, `checks.py` lists the checks, `suite.py` runs
them. What a check asks stands in the docstring of its function.
"""

from gpu_worker.conformance.subject import Subject
from gpu_worker.conformance.suite import CheckResult, Outcome, run_conformance

__all__ = ["CheckResult", "Outcome", "Subject", "run_conformance"]
