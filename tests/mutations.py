"""Ways to corrupt a valid step, whatever made it.

Each breaks a rule, and the refusal must name the place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import Any

from msgspec.structs import replace

from infinipipe.ir import (
    Chunk,
    Header,
    Op,
    OpKind,
    Replica,
    Search,
    Slice,
    Step,
    chunk_chains,
    verify_step,
)
from tests.plans import B, F, I, W

Mutation = Callable[[Random, Header, Step], Step]
MUTATIONS: dict[str, tuple[Mutation, str]] = {}
"""By name, a mutation and the pattern of the place that the refusal names; `{r}` is the replica."""

OP = r"step \d+, replica {r}, stage \d+: op \d+[FBIW]-?\d+ "
STAGE = r"step \d+, replica {r}, stage \d+: "
CHUNK = r"step \d+(, replica \d+, chunk \d+)?: "
STEP = r"step -?\d+: "


def mutation(place: str) -> Callable[[Mutation], Mutation]:
    """Register a mutation under the name of its function."""

    def register(function: Mutation) -> Mutation:
        MUTATIONS[function.__name__.replace("_", " ")] = function, place
        return function

    return register


def busy_replica(step: Step) -> int:
    """Return the replica with most chunks, whose programs and chunks are corrupted."""
    return max(range(len(step.replicas)), key=lambda r: len(step.replicas[r].chunks))


def with_item(items: tuple[Any, ...], at: int, item: Any) -> tuple[Any, ...]:
    return (*items[:at], item, *items[at + 1 :])


def edit_replica(step: Step, edit: Callable[[Replica], dict[str, Any]]) -> Step:
    number = busy_replica(step)
    replica = step.replicas[number]
    return replace(
        step, replicas=with_item(step.replicas, number, replace(replica, **edit(replica)))
    )


def edit_program(draw: Random, step: Step, edit: Callable[[list[Op]], None]) -> Step:
    def changes(replica: Replica) -> dict[str, Any]:
        stage = draw.randrange(len(replica.programs))
        program = list(replica.programs[stage])
        edit(program)
        return {"programs": with_item(replica.programs, stage, tuple(program))}

    return edit_replica(step, changes)


def edit_slice(draw: Random, step: Step, edit: Callable[[Slice], tuple[Slice, ...]]) -> Step:
    def changes(replica: Replica) -> dict[str, Any]:
        chunk = draw.randrange(len(replica.chunks))
        slices = replica.chunks[chunk].slices
        at = draw.randrange(len(slices))
        edited = (*slices[:at], *edit(slices[at]), *slices[at + 1 :])
        return {"chunks": with_item(replica.chunks, chunk, Chunk(edited))}

    return edit_replica(step, changes)


def edit_prediction(draw: Random, step: Step, **changes: Any) -> Step:
    def edit(replica: Replica) -> dict[str, Any]:
        stage = draw.randrange(len(replica.predicted))
        changed = replace(replica.predicted[stage], **changes)
        return {"predicted": with_item(replica.predicted, stage, changed)}

    return edit_replica(step, edit)


def edit_sequence(draw: Random, step: Step, **changes: Callable[[int], int]) -> Step:
    at = draw.randrange(len(step.sequences))
    old = step.sequences[at]
    new = replace(old, **{name: change(getattr(old, name)) for name, change in changes.items()})
    return replace(step, sequences=with_item(step.sequences, at, new))


def place(program: list[Op], kinds: tuple[OpKind, ...], chunk: int) -> int:
    return next(p for p, op in enumerate(program) if op.kind in kinds and op.chunk == chunk)


def long_chain(step: Step) -> tuple[int, ...]:
    replica = step.replicas[busy_replica(step)]
    return max(chunk_chains(replica.chunks, step.sequences), key=len)


def swap(program: list[Op], a: int, b: int) -> None:
    program[a], program[b] = program[b], program[a]


@mutation(STEP)
def search_with_an_impossible_gap(draw: Random, header: Header, step: Step) -> Step:
    gap = draw.choice([-0.1, float("nan"), float("inf")])
    return edit_replica(
        step, lambda _: {"search": Search(winner="epp", solver="SCIP", status="optimal", gap=gap)}
    )


@mutation(STEP)
def search_that_cannot_be_printed(draw: Random, header: Header, step: Step) -> Step:
    return edit_replica(
        step, lambda _: {"search": Search(winner=draw.choice(["\x1b[2J", "a\nb", "x" * 1000]))}
    )


@mutation(OP)
def forwards_of_a_chain_swapped(draw: Random, header: Header, step: Step) -> Step:
    a, b = draw.sample(long_chain(step), 2)
    return edit_program(draw, step, lambda p: swap(p, place(p, (F,), a), place(p, (F,), b)))


@mutation(OP)
def backwards_of_a_chain_swapped(draw: Random, header: Header, step: Step) -> Step:
    a, b = draw.sample(long_chain(step), 2)
    return edit_program(draw, step, lambda p: swap(p, place(p, (B, I), a), place(p, (B, I), b)))


@mutation(OP)
def backward_moved_before_its_forward(draw: Random, header: Header, step: Step) -> Step:
    def edit(program: list[Op]) -> None:
        chunk = draw.choice(program).chunk
        program.insert(place(program, (F,), chunk), program.pop(place(program, (B, I), chunk)))

    return edit_program(draw, step, edit)


@mutation(r"step \d+, replica {r}, stage \d+: (op|deadlock: op) \d+[FBI]\d+ ")
def forwards_of_two_chains_swapped_on_one_stage(draw: Random, header: Header, step: Step) -> Step:
    replica = step.replicas[busy_replica(step)]
    chains = draw.sample(chunk_chains(replica.chunks, step.sequences), 2)
    a, b = (chain[0] for chain in chains)
    return edit_program(draw, step, lambda p: swap(p, place(p, (F,), a), place(p, (F,), b)))


@mutation(OP)
def op_dropped(draw: Random, header: Header, step: Step) -> Step:
    return edit_program(draw, step, lambda p: p.pop(draw.randrange(len(p))) and None)


@mutation(OP)
def op_doubled(draw: Random, header: Header, step: Step) -> Step:
    return edit_program(draw, step, lambda p: p.insert(draw.randrange(len(p)), draw.choice(p)))


@mutation(OP)
def program_cut(draw: Random, header: Header, step: Step) -> Step:
    def edit(program: list[Op]) -> None:
        del program[draw.randrange(len(program)) :]

    return edit_program(draw, step, edit)


@mutation(OP)
def op_of_a_chunk_that_is_not_there(draw: Random, header: Header, step: Step) -> Step:
    def edit(program: list[Op]) -> None:
        at = draw.randrange(len(program))
        program[at] = Op(program[at].kind, draw.choice((-1, len(program), 2**40)))

    return edit_program(draw, step, edit)


@mutation(OP)
def op_of_another_kind(draw: Random, header: Header, step: Step) -> Step:
    def edit(program: list[Op]) -> None:
        at = draw.randrange(len(program))
        program[at] = Op(
            draw.choice([kind for kind in OpKind if kind != program[at].kind]), program[at].chunk
        )

    return edit_program(draw, step, edit)


@mutation(OP)
def weights_before_inputs(draw: Random, header: Header, step: Step) -> Step:
    def edit(program: list[Op]) -> None:
        chunk = draw.choice(program).chunk
        at = place(program, (B, I), chunk)
        program[:] = [op for op in program if op.chunk != chunk or op.kind not in (B, I, W)]
        program[at:at] = [Op(W, chunk), Op(I, chunk)]

    return edit_program(draw, step, edit)


@mutation(STAGE)
def program_of_a_stage_missing(draw: Random, header: Header, step: Step) -> Step:
    return edit_replica(step, lambda r: {"programs": r.programs[:-1]})


@mutation(CHUNK)
def slice_dropped(draw: Random, header: Header, step: Step) -> Step:
    return edit_slice(draw, step, lambda s: ())


@mutation(CHUNK)
def slice_doubled(draw: Random, header: Header, step: Step) -> Step:
    return edit_slice(draw, step, lambda s: (s, s))


@mutation(CHUNK)
def slice_shifted(draw: Random, header: Header, step: Step) -> Step:
    return edit_slice(draw, step, lambda s: (replace(s, start=s.start + draw.choice((-1, 1))),))


@mutation(CHUNK)
def slice_longer(draw: Random, header: Header, step: Step) -> Step:
    return edit_slice(draw, step, lambda s: (replace(s, length=s.length + 1),))


@mutation(CHUNK)
def slice_shorter(draw: Random, header: Header, step: Step) -> Step:
    return edit_slice(draw, step, lambda s: (replace(s, length=s.length - 1),))


@mutation(CHUNK)
def empty_slice_added(draw: Random, header: Header, step: Step) -> Step:
    return edit_slice(draw, step, lambda s: (s, Slice(s.sequence, s.stop, 0)))


@mutation(CHUNK)
def slice_cut_in_two_in_its_chunk(draw: Random, header: Header, step: Step) -> Step:
    chunk = long_chain(step)[0]

    def edit(replica: Replica) -> dict[str, Any]:
        first, *rest = replica.chunks[chunk].slices
        halves = (
            replace(first, length=1),
            replace(first, start=first.start + 1, length=first.length - 1),
        )
        return {"chunks": with_item(replica.chunks, chunk, Chunk((*halves, *rest)))}

    return edit_replica(step, edit)


@mutation(CHUNK)
def slice_of_a_sequence_that_is_not_there(draw: Random, header: Header, step: Step) -> Step:
    other = draw.choice((-1, len(step.sequences), 2**62))
    return edit_slice(draw, step, lambda s: (replace(s, sequence=other),))


@mutation(STAGE)
def chunk_without_ops(draw: Random, header: Header, step: Step) -> Step:
    def edit(replica: Replica) -> dict[str, Any]:
        at = next(c for c, chunk in enumerate(replica.chunks) if len(chunk.slices) > 1)
        slices = replica.chunks[at].slices
        chunks = with_item(replica.chunks, at, Chunk(slices[:-1]))
        return {"chunks": (*chunks, Chunk(slices[-1:]))}

    return edit_replica(step, edit)


@mutation(STAGE + r"op \d+B\d+ recomputes")
def recompute_of_more_layers_than_there_are(draw: Random, header: Header, step: Step) -> Step:
    stage = draw.randrange(len(header.stages))

    def edit(replica: Replica) -> dict[str, Any]:
        counts = with_item(
            replica.recompute[stage], 0, draw.choice((-1, header.stages[stage].num_layers + 1))
        )
        return {"recompute": with_item(replica.recompute, stage, counts)}

    return edit_replica(step, edit)


@mutation(STAGE + r"op \d+B\d+ recomputes")
def both_counts_of_more_layers_than_there_are(draw: Random, header: Header, step: Step) -> Step:
    stage = draw.randrange(len(header.stages))

    def edit(replica: Replica) -> dict[str, Any]:
        left = header.stages[stage].num_layers - replica.recompute[stage][0]
        counts = with_item(replica.keep_attention[stage], 0, draw.choice((-1, left + 1)))
        return {"keep_attention": with_item(replica.keep_attention, stage, counts)}

    return edit_replica(step, edit)


@mutation(STAGE)
def count_of_layers_that_keep_attention_missing(draw: Random, header: Header, step: Step) -> Step:
    return edit_replica(
        step, lambda r: {"keep_attention": (*r.keep_attention[:-1], r.keep_attention[-1][1:])}
    )


@mutation(STAGE)
def recompute_count_missing(draw: Random, header: Header, step: Step) -> Step:
    return edit_replica(step, lambda r: {"recompute": (*r.recompute[:-1], r.recompute[-1][1:])})


@mutation(STAGE)
def peak_over_the_limit(draw: Random, header: Header, step: Step) -> Step:
    return edit_prediction(draw, step, peak_bytes=max(header.memory_limit_bytes) + 1)


@mutation(STAGE)
def time_that_is_no_number(draw: Random, header: Header, step: Step) -> Step:
    return edit_prediction(
        draw, step, **{draw.choice(("busy_s", "recompute_s", "bubble_s")): float("nan")}
    )


@mutation(STAGE)
def busy_longer_than_the_makespan(draw: Random, header: Header, step: Step) -> Step:
    return edit_prediction(draw, step, busy_s=step.makespan_s * 1.01)


@mutation(STEP)
def denominator_off_by_one(draw: Random, header: Header, step: Step) -> Step:
    return replace(step, denominator=step.denominator + draw.choice((-1, 1)))


@mutation(STEP)
def target_lost(draw: Random, header: Header, step: Step) -> Step:
    return replace(step, sequences=tuple(replace(s, num_targets=0) for s in step.sequences))


@mutation(STEP)
def more_targets_than_tokens(draw: Random, header: Header, step: Step) -> Step:
    return edit_sequence(draw, step, num_targets=lambda n: 10**9)


@mutation(r"step \d+(, replica \d+, chunk \d+)?: ")
def sequence_longer(draw: Random, header: Header, step: Step) -> Step:
    return edit_sequence(draw, step, length=lambda n: n + 1)


@mutation(STEP)
def row_twice(draw: Random, header: Header, step: Step) -> Step:
    first, second = draw.sample(range(len(step.sequences)), 2)
    twin = replace(step.sequences[second], row=step.sequences[first].row)
    return replace(step, sequences=with_item(step.sequences, second, twin))


@mutation(STEP)
def row_outside_the_dataset(draw: Random, header: Header, step: Step) -> Step:
    return edit_sequence(draw, step, row=lambda _: draw.choice((-1, header.dataset.num_sequences)))


@mutation(STEP)
def bound_above_the_makespan(draw: Random, header: Header, step: Step) -> Step:
    return replace(step, bound_s=step.makespan_s * 1.001)


@mutation(STEP)
def makespan_that_is_no_number(draw: Random, header: Header, step: Step) -> Step:
    return replace(step, makespan_s=draw.choice((float("nan"), float("inf"), -1.0)))


@mutation(STEP)
def step_beyond_the_plan(draw: Random, header: Header, step: Step) -> Step:
    return replace(step, index=draw.choice((-1, header.num_steps)))


@mutation(STEP)
def replica_missing(draw: Random, header: Header, step: Step) -> Step:
    return replace(step, replicas=step.replicas[:-1])


NEEDS_CHAINS = [name for name in MUTATIONS if "of a chain" in name]


def mutants(name: str, header: Header, step: Step, trials: int = 20) -> Iterator[tuple[Step, str]]:
    """Yield corrupted steps and the pattern that the refusal begins with.

    The step itself must be valid and rich: it has a chain of two chunks, a second chain, and a
    chunk of two slices.
    """
    verify_step(header, step)
    function, pattern = MUTATIONS[name]
    for seed in range(trials):
        yield function(Random(seed), header, step), pattern.replace("{r}", str(busy_replica(step)))
