"""What is left when something goes wrong."""

from __future__ import annotations

from gpu_worker.conformance.bench import Bench
from gpu_worker.conformance.probe import Fault, InjectedError
from gpu_worker.conformance.subject import ViolationError, require


def failure(bench: Bench) -> None:
    """A forward that fails, halfway or at its end, costs its session only; that starts anew at chunk 0."""
    for fault in (Fault.COMMIT, Fault.END):
        _fail_once(bench, fault)


def _fail_once(bench: Bench, fault: Fault) -> None:
    tag = fault.name.lower()
    fresh, neighbour = bench.alone(f"{tag}-fresh", 2), bench.alone(f"{tag}-near", 2, seed=2)
    world, near = bench.session(f"{tag}-world"), bench.session(f"{tag}-neighbour")
    seen = [bench.tick(near, seed=2).digest] if bench.capacity > 1 else []
    free = bench.free_pages
    bench.tick(world)
    bench.probe.forget_calls()
    bench.probe.fault = fault
    _require_failure(bench, world, fault)
    require(
        bench.probe.closes == [world], f"the close hook was not called once after a failure {fault.value}"
    )
    bench.runner.check_integrity()
    require(bench.free_pages == free, f"pages are still held after a failure {fault.value}")
    if seen:
        seen.append(bench.tick(near, seed=2).digest)
        require(seen == neighbour, f"a failure {fault.value} changed another session")
    bench.restarts(world)
    require(bench.run(world, 2) == fresh, f"after a failure {fault.value} the session does not start anew")
    bench.close_all()


def _require_failure(bench: Bench, session_id: str, fault: Fault) -> None:
    try:
        bench.tick(session_id)
    except ViolationError:
        return  # an output with an error is a failure that is told, too
    except Exception:  # noqa: BLE001 - the pipeline may have put an error of its own in place of the injected one
        require(bench.probe.fault is None, "the forward failed before anything was made to fail")
        return
    raise ViolationError(f"the pipeline hides a failure {fault.value}: its output can't be trusted")


def hooks(bench: Bench) -> None:
    """The lifecycle hooks take any session, known or not; one that raises all the same costs no page."""
    session_id, near = bench.session("world"), bench.session("neighbour")
    for hook in ("reset_ar_diffusion_session", "close_ar_diffusion_session"):
        try:
            getattr(bench.probe.pipeline, hook)(bench.session("unknown"))
        except Exception as error:
            raise ViolationError(
                f"{hook} raises for a session that the model does not know: {type(error).__name__}: {error}"
            ) from error
    if bench.capacity > 1:
        bench.tick(near, seed=2)
    free = bench.free_pages
    bench.tick(session_id)
    bench.probe.fault = Fault.HOOK
    try:
        bench.close(session_id)
    except InjectedError:
        pass
    else:
        raise ViolationError("the error of a hook was lost")
    require(not bench.runner.is_resident(session_id), "a session whose hook raised is still resident")
    bench.runner.check_integrity()
    require(bench.free_pages == free, "pages are still held after a hook that raised")
    for name in (session_id, near):
        bench.tick(name, seed=2)
        bench.close(name)
    bench.require_all_free("after a hook that raised")
