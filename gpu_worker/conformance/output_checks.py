"""What a chunk is: its identity, its numbers, what it depends on."""

from __future__ import annotations

from contracts.tick import metadata_from_envelope
from gpu_worker.capability import BeginsAnewOnPrompt, SupportsStepExecution
from gpu_worker.conformance.bench import Bench, float_tensors
from gpu_worker.conformance.subject import NotApplicableError, require
from gpu_worker.encoding import encode_frames, encode_output


def identity(bench: Bench) -> None:
    """One chunk a tick; its metadata equals the tick in every field; payload and frames can be stored."""
    session_id = bench.session("world")
    for event_ids in ((), (3, 4), (9,)):
        made = bench.tick(session_id, event_ids=event_ids)
        metadata_from_envelope(made.output.metadata).check_equals(made.tick)
        require(len(made.output.payload) > 0, f"chunk {made.tick.chunk_index} has an empty payload")
        encode_output(made.output)
        if made.output.frames is not None:
            encode_frames(made.output.frames)
    bench.close(session_id)


def finite_output(bench: Bench) -> None:
    """Every number of every chunk is finite, also once the window has moved on."""
    session_id = bench.session("world")
    for _ in range(bench.chunks_past_window):
        made = bench.tick(session_id)
        for name, tensor in float_tensors(made.output).items():
            finite = bool(tensor.isfinite().all())
            require(finite, f"payload {name!r} of chunk {made.tick.chunk_index} is not finite everywhere")
    bench.close(session_id)


def determinism(bench: Bench) -> None:
    """Two sessions of the same seed, parameters and ticks yield the same bytes, whatever their names."""
    count = bench.chunks_past_window
    first = bench.alone("first", count)
    second = bench.alone("second", count)
    differing = [index for index in range(count) if first[index] != second[index]]
    require(
        not differing,
        f"chunk {differing[:1]} differs between two equal sessions: all randomness must come from "
        "request.generator, and nothing from names or from what ran before",
    )


def step_execution(bench: Bench) -> None:
    """The step functions, where there are some, yield the same bytes as the forward."""
    pipeline = bench.probe.pipeline
    if not isinstance(pipeline, SupportsStepExecution):
        raise NotApplicableError("the pipeline has no step functions")
    count = bench.chunks_past_window
    whole = bench.alone("whole", count)
    stepping = Bench(bench.subject, pipeline, bench.name, steps=True)
    require(
        stepping.alone("stepwise", count) == whole, "a chunk made step by step differs from the forward's"
    )
    stepping.require_all_free("after the close")


def prompt_switch(bench: Bench) -> None:
    """Another prompt takes effect in the running world, which keeps its past; or begins a new one, as it says it does."""
    session_id, opening = bench.session("switched"), bench.session("opening")
    other = bench.subject.prompts[1]
    kept = bench.alone("kept", 2)
    first = bench.tick(session_id).digest
    before = bench.probe.frames[session_id]
    switched = bench.tick(session_id, prompt=other).digest
    after = bench.probe.frames[session_id]
    bench.close(session_id)
    begun_with_other = bench.tick(opening, prompt=other).digest
    bench.close(opening)
    pipeline = bench.probe.pipeline
    if isinstance(pipeline, BeginsAnewOnPrompt) and pipeline.begins_anew_on_prompt:
        require(switched == begun_with_other, "another prompt begins a world that is no new one")
        return
    for branch, frames in before.items():
        require(frames == 0 or after[branch] > frames, f"the switch made branch {branch!r} forget its past")
    if begun_with_other == first:
        raise NotApplicableError("the first chunk does not depend on the prompt")
    require(
        switched != kept[1], "a new prompt within a session changes nothing, though one at its start does"
    )


def rolling_window(bench: Bench) -> None:
    """The rollout goes on past the window: frames are committed chunk by chunk, old pages are given back."""
    session_id = bench.session("world")
    per_chunk = bench.spec.frames_per_block
    most = len(bench.spec.branch_names) * bench.runner.plan.memory.retained_blocks_per_session
    before = dict.fromkeys(bench.spec.branch_names, 0)
    for index in range(bench.chunks_past_window):
        bench.tick(session_id)
        done = bench.probe.frames[session_id]
        # A rollout may begin anew where attention no longer reaches: then its frames count from 0 again.
        steps = {
            branch: done[branch] - (before[branch] if done[branch] >= before[branch] else 0)
            for branch in done
        }
        committed = [step for step in steps.values() if step]
        require(bool(committed), f"chunk {index} committed no frame of KV, so later chunks can't see it")
        require(
            all(1 <= step <= per_chunk for step in committed),
            f"chunk {index} committed {steps} frames, frames_per_block is {per_chunk}",
        )
        held = bench.runner.cache.pool.num_usable - bench.free_pages
        require(held <= most, f"{held} pages are held after chunk {index}, the window and sink need {most}")
        bench.runner.check_integrity()
        before = done
    bench.close(session_id)
    bench.require_all_free("after the close")
