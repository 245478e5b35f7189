"""The planner's side of the product starts without torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers")

PROBE = """
import sys
{code}
heavy = [name for name in {heavy} if name in sys.modules]
assert not heavy, heavy
"""


@pytest.mark.parametrize(
    "module",
    ["infinipipe", "infinipipe.cli", "infinipipe.dataset", "infinipipe.ir", "infinipipe.ir.store", "infinipipe.ir.verify", "infinipipe.planner.compile", "infinipipe.profiles", "infinipipe.profiles.analytic"],
)
def test_module_imports_no_torch(module: str) -> None:
    subprocess.run([sys.executable, "-c", PROBE.format(code=f"import {module}", heavy=HEAVY)], check=True, timeout=60)
