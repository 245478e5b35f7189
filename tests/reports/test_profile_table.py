"""Profiles for people: tables, a page that needs no network, and docs that leave no field out."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from infinipipe.cli import run_command
from infinipipe.measure.samples import measure_accuracy
from infinipipe.profiles import Profile, Sample, read_model, write_profile
from infinipipe.profiles.analytic import analytic_profile
from infinipipe.profiles.profile import PROFILE_FORMAT_VERSION
from infinipipe.reports.profile_page import profile_page

DOCS = (Path(__file__).parents[2] / "docs" / "profile-format.md").read_text()
HOSTILE = "</script><script>window.hacked=1</script><img src=x onerror='window.hacked=1'>[bold]"


def sample(op: str, tokens: int, error: float, held_out: bool) -> Sample:
    return Sample(
        op=op,  # type: ignore[arg-type]
        slices=((0, tokens), (64, 32)),
        seconds=1e-3 * tokens,
        spread_s=1e-5,
        num_repeats=5,
        fitted_s=1e-3 * tokens * (1 + error),
        held_out=held_out,
    )


@pytest.fixture
def profile() -> Profile:
    samples = tuple(
        sample(op, tokens, error, held_out)
        for op in ("forward", "backward", "recomputed")
        for tokens, error, held_out in (
            (16, 0.0, False),
            (64, 0.02, False),
            (40, -0.1, True),
            (50, 0.3, True),
        )
    )
    plain = analytic_profile(read_model("tiny"), "h100-80g")
    return msgspec.structs.replace(plain, samples=samples, accuracy=measure_accuracy(samples))


def test_accuracy_is_of_relative_errors(profile: Profile) -> None:
    held_out = next(a for a in profile.accuracy if a.op == "backward" and a.held_out)
    assert held_out.num_samples == 2
    errors = (held_out.median_error, held_out.p90_error, held_out.worst_error)
    assert errors == pytest.approx((0.2, 0.28, 0.3))


def test_show_prints_tables(
    profile: Profile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hostile = msgspec.structs.replace(
        profile, model=msgspec.structs.replace(profile.model, name=HOSTILE)
    )
    write_profile(hostile, tmp_path / "p.json")
    assert run_command(["profile", "--show", str(tmp_path / "p.json")]) == 0
    out = capsys.readouterr().out
    assert HOSTILE in out
    for words in (
        "analytic",
        "sm_90",
        "nothing was measured",
        "16,384 tokens",
        "ns per pair",
        "reduce-scatter of 8 in a node",
        "all-gather of 8 between nodes",
        "backward, held out",
    ):
        assert words in out
    row = next(line for line in out.splitlines() if line.startswith("backward, held out")).split()
    assert row[-4:] == ["2", "20.0%", "28.0%", "30.0%"]
    sizes = msgspec.to_builtins(profile.bytes)
    for size in sizes.values():
        for value in size.values() if isinstance(size, dict) else [size]:
            assert f" {value:,.0f} " in out
    for name in ("layer F", "layer B", "layer I", "layer W"):
        assert name in out


def test_the_page_loads_nothing_and_names_stay_text(profile: Profile, tmp_path: Path) -> None:
    hostile = msgspec.structs.replace(
        profile, model=msgspec.structs.replace(profile.model, name=HOSTILE)
    )
    plain, page = profile_page(profile), profile_page(hostile)
    assert page.count("<script") == plain.count("<script")
    assert "onerror='" not in page
    assert "default-src 'none'" in page
    from plotly.offline import get_plotlyjs

    rest = plain.replace(get_plotlyjs(), "")
    for reference in ("<link", "<script src", "@import", " src=", "http://", "cdn"):
        assert reference not in rest


def test_show_writes_the_page(profile: Profile, tmp_path: Path) -> None:
    write_profile(profile, tmp_path / "p.json")
    assert (
        run_command(
            ["profile", "--show", str(tmp_path / "p.json"), "--html", str(tmp_path / "p.html")]
        )
        == 0
    )
    assert "Fitted against measured" in (tmp_path / "p.html").read_text()


def structs(kind: type) -> set[type]:
    """Return all structs that a struct holds."""
    found = {kind}
    for hint in msgspec.structs.fields(kind):
        for inner in re.findall(r"infinipipe[.\w]*\.(\w+)", repr(hint.type)):
            struct = getattr(
                __import__("infinipipe.profiles.profile", fromlist=[inner]), inner, None
            )
            if (
                isinstance(struct, type)
                and issubclass(struct, msgspec.Struct)
                and struct not in found
            ):
                found |= structs(struct)
    return found


def test_every_field_of_a_profile_is_documented() -> None:
    kinds = structs(Profile)
    assert {
        "Curve",
        "LayerTime",
        "Line",
        "Times",
        "Links",
        "Bytes",
        "Sample",
        "Accuracy",
        "Refinement",
        "Device",
        "Model",
    } <= {kind.__name__ for kind in kinds}
    missing = {
        f"{kind.__name__}.{name}"
        for kind in kinds
        for name in kind.__struct_fields__
        if f"`{name}`" not in DOCS
    }
    assert not missing
    assert f"format version {PROFILE_FORMAT_VERSION}" in DOCS
