"""Any corruption of a plan of any policy is refused by a message that names the place."""

from __future__ import annotations

import json
import re
import tempfile
from functools import cache
from pathlib import Path

import pytest

from infinipipe.dataset import open_dataset
from infinipipe.errors import VerifyError
from infinipipe.ir import Header, Step, open_plan, verify_step
from infinipipe.planner import POLICIES, CompileOptions, compile_plan
from infinipipe.planner.policies import ONE_STAGE
from infinipipe.profiles import read_model
from infinipipe.profiles.analytic import analytic_profile
from tests.mutations import MUTATIONS, NEEDS_CHAINS, mutants

LENGTHS = (12_000, 11_000, 9_000, 9_500, 6_000, 5_500, 700, 600, 400, 300, 90, 80, 60, 50, 20, 10)


WHOLE = ("1f1b", "gpipe")
"""Policies that split no sequence, so that their plans have no chain to corrupt."""
APPLICABLE = {
    name: [m for m in MUTATIONS if name not in WHOLE or m not in NEEDS_CHAINS]
    for name in sorted(POLICIES.keys() - ONE_STAGE)
}


# A fixture would be made again for every kind of corruption.
@cache
def compiled(policy: str) -> tuple[Header, Step]:
    with tempfile.TemporaryDirectory() as folder:
        return compile_in(Path(folder), policy)


def compile_in(folder: Path, policy: str) -> tuple[Header, Step]:
    (folder / "lengths.jsonl").write_text(
        "".join(json.dumps({"length": n}) + "\n" for n in LENGTHS)
    )
    profile = analytic_profile(read_model("llama-7b"), "a800-80g")
    options = CompileOptions(
        num_stages=4,
        num_replicas=2,
        memory_limit_bytes=(60 * 2**30,),
        batch_size=len(LENGTHS),
        policy=policy,
    )
    dataset = open_dataset(folder / "lengths.jsonl", "bytes", profile.model.vocabulary_size)
    compile_plan(dataset, profile, options, folder / "plan.msgpack")
    with open_plan(folder / "plan.msgpack") as reader:
        return reader.header, reader.step(0)


@pytest.mark.parametrize("policy", APPLICABLE)
def test_every_policy_is_corrupted_in_25_ways_at_least(policy: str) -> None:
    assert len(APPLICABLE[policy]) >= 25


@pytest.mark.parametrize(
    ("policy", "name"),
    [(policy, name) for policy, names in APPLICABLE.items() for name in names],
)
def test_corruption_is_refused(policy: str, name: str) -> None:
    header, step = compiled(policy)
    for mutant, pattern in mutants(name, header, step):
        with pytest.raises(VerifyError) as caught:
            verify_step(header, mutant)
        assert re.match(pattern, str(caught.value)), str(caught.value)
