"""The plan file: complete or absent, readable by anyone, and never silently wrong."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import shutil
import tracemalloc
import zlib
from pathlib import Path

import msgpack
import msgspec
import pytest

from infinipipe.errors import PlanFileError
from infinipipe.ir import Header, PlanWriter, Step, open_plan, verify_plan
from infinipipe.ir.file.encoding import Index, make_trailer
from tests.plans import make_header, make_model, make_step, write_plan


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "plan.msgpack"


def read_all(path: Path) -> list[Step]:
    with open_plan(path) as reader:
        steps = list(reader)
        verify_plan(reader)
    return steps


def refused(path: Path) -> str:
    with pytest.raises(PlanFileError) as caught:
        read_all(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    assert len(message) < 600
    assert "compile" in message
    return message


def rewrite(path: Path, objects: list[object], totals: dict[str, object] | None = None) -> None:
    """Write a file whose checksums are all right, whatever its objects say."""
    data = [o if isinstance(o, bytes) else msgpack.packb(o) for o in objects]
    offsets = [sum(map(len, data[:k])) for k in range(len(data))]
    with_sums = {
        "offsets": b"".join(o.to_bytes(8) for o in offsets),
        "crc32s": b"".join(zlib.crc32(d).to_bytes(4) for d in data),
        "sha256": hashlib.sha256(b"".join(data)).hexdigest(),
        "totals": totals if totals is not None else {"num_steps": len(data) - 1},
    }
    index = msgpack.packb(with_sums)
    path.write_bytes(b"".join(data) + index + make_trailer(sum(map(len, data)), index))


def objects_of(path: Path) -> list[object]:
    with path.open("rb") as file:
        return list(msgpack.Unpacker(file))


def test_round_trip_and_random_access(path: Path) -> None:
    header = make_header(num_stages=3, num_replicas=2, num_steps=4)
    steps = write_plan(path, header)
    with open_plan(path) as reader:
        assert reader.header == header
        assert reader.num_steps == len(reader) == 4
        assert [reader.step(k) for k in (3, 0, 2)] == [steps[3], steps[0], steps[2]]
        assert list(reader) == steps
        assert reader.totals.num_tokens == sum(s.num_tokens for s in steps)
        assert reader.totals.makespan_s == 4.0
        reader.check_all()


def test_same_steps_give_the_same_bytes(tmp_path: Path) -> None:
    write_plan(tmp_path / "a")
    write_plan(tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_any_msgpack_reader_walks_the_file(path: Path) -> None:
    write_plan(path)
    header, *steps, index, trailer = objects_of(path)
    assert isinstance(header, dict)
    assert isinstance(index, dict)
    assert header["format_version"] == 2
    assert [s["index"] for s in steps if isinstance(s, dict)] == [0, 1]
    assert sorted(index) == ["crc32s", "offsets", "sha256", "totals"]
    assert isinstance(trailer, bytes)
    assert trailer[:8] == b"infiplan"


def test_step_out_of_range(path: Path) -> None:
    write_plan(path)
    with open_plan(path) as reader:
        for index in (-1, 2, 10**30):
            with pytest.raises(PlanFileError, match=r"no step -?\d+; choose 0 to 1 with --step"):
                reader.step(index)


def test_an_error_leaves_nothing_and_keeps_the_plan_before(path: Path) -> None:
    write_plan(path)
    before = path.read_bytes()
    with pytest.raises(ZeroDivisionError), PlanWriter(path, make_header()) as writer:
        writer.append(make_step(make_header(), index=1 // 0))
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize("name", ["nowhere/plan", ".", "a" * 300])
def test_unwritable_path_is_one_clear_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(PlanFileError, match="choose another file with --output"):
        write_plan(tmp_path / name)
    assert os.listdir(tmp_path) == []


def test_missing_steps_are_our_fault(path: Path) -> None:
    with pytest.raises(AssertionError), PlanWriter(path, make_header(num_steps=2)) as writer:
        writer.append(make_step(make_header()))
    assert os.listdir(path.parent) == []


def test_missing_folder_pipe_and_empty(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty").touch()
    for name, why in (
        ("gone", "No such file"),
        (".", "not a regular file"),
        ("pipe", "not a regular"),
        ("empty", "not a"),
    ):
        assert why in refused(tmp_path / name)


def test_names_with_line_breaks_stay_on_one_line(tmp_path: Path) -> None:
    with pytest.raises(PlanFileError) as caught:
        open_plan(tmp_path / "a\nb\x1b[31m\udce9")
    assert "a\\nb\\x1b[31m\\udce9: No such file" in str(caught.value)


def test_foreign_files_are_refused(path: Path) -> None:
    for data in (
        b"\x00" * 500,
        b"PK\x03\x04",
        b'{"format_version": 1}',
        msgpack.packb({"a": 1}),
        os.urandom(1000),
    ):
        path.write_bytes(data)
        assert "not a plan file" in refused(path)


def test_other_versions_are_refused_before_anything_is_decoded(path: Path) -> None:
    hints = {3: "use a newer infinipipe", 1: "compile it again", 0: "compile it again"}
    for version, hint in hints.items():
        rewrite(path, [{"format_version": version, "colour": "blue"}])
        message = refused(path)
        assert f"plan format {version}, this infinipipe reads format 2" in message
        assert hint in message
        assert "\n" not in message


def test_trailing_garbage_and_concatenated_plans_are_refused(path: Path) -> None:
    write_plan(path)
    data = path.read_bytes()
    for extra in (b"\x00", b"\n", data[-26:], data):
        path.write_bytes(data + extra)
        refused(path)


def test_every_truncation_is_refused(path: Path) -> None:
    write_plan(path)
    for size in reversed(range(path.stat().st_size)):
        os.truncate(path, size)
        refused(path)


def test_every_flipped_bit_is_refused(path: Path) -> None:
    """Every byte of the file, a bit each, and 1000 random bytes replaced."""
    write_plan(path)
    data = path.read_bytes()
    draw = random.Random(0)
    flips = [(at, 1 << draw.randrange(8)) for at in range(len(data))]
    flips += [(draw.randrange(len(data)), draw.randrange(1, 256)) for _ in range(1000)]
    assert len(flips) >= 2000
    with path.open("r+b", buffering=0) as file:
        for at, mask in flips:
            file.seek(at)
            file.write(bytes([data[at] ^ mask]))
            refused(path)
            file.seek(at)
            file.write(data[at : at + 1])
    read_all(path)


def test_random_splices_are_refused(path: Path) -> None:
    """Ranges dropped, doubled, moved, zeroed, or replaced by noise."""
    write_plan(path)
    data = path.read_bytes()
    draw = random.Random(0)
    for _ in range(500):
        a, b, c = sorted(draw.sample(range(len(data) + 1), 3))
        first, second = data[a:b], data[b:c]
        middle = draw.choice(
            (
                first,
                second,
                first + first + second,
                second + first,
                b"\x00" * (c - a),
                draw.randbytes(c - a),
            )
        )
        spliced = data[:a] + middle + data[c:]
        if spliced != data:
            path.write_bytes(spliced)
            refused(path)


def test_a_flipped_step_leaves_the_others_readable(path: Path) -> None:
    steps = write_plan(path)
    data = bytearray(path.read_bytes())
    data[-500] ^= 1
    path.write_bytes(data)
    with open_plan(path) as reader:
        assert reader.step(0) == steps[0]
        with pytest.raises(PlanFileError, match="checksum of its step 1 does not match"):
            reader.step(1)
        with pytest.raises(PlanFileError, match="sha256"):
            reader.check_all()


def test_unknown_fields_are_refused(path: Path) -> None:
    write_plan(path)
    header, *steps, _, _ = objects_of(path)
    assert isinstance(header, dict)
    rewrite(path, [header | {"colour\n": 1}, *steps])
    assert "unknown field `colour\\n`" in refused(path)
    assert isinstance(steps[0], dict)
    rewrite(path, [header, steps[0] | {"extra": 1}, steps[1]])
    assert "its step 0 is not as the format says: Object contains unknown field `extra`" in refused(
        path
    )


def test_wrong_number_or_order_of_steps_is_refused(path: Path) -> None:
    write_plan(path)
    header, *steps, _, _ = objects_of(path)
    rewrite(path, [header, steps[0]])
    assert "holds 1 steps" in refused(path)
    rewrite(path, [header, steps[1], steps[0]])
    assert "step 0 says it is step 1" in refused(path)


HOSTILE = {
    "deep": b"\x91" * 100_000 + b"\x01",
    "deep map": b"\x81\xa1a" * 50_000 + b"\x01",
    "huge array": b"\xdd\xff\xff\xff\xff\x01",
    "huge map": b"\xdf\xff\xff\xff\xff\x01",
    "huge bytes": b"\xc6\xff\xff\xff\xff\x01",
    "huge string": b"\xdb\xff\xff\xff\xff\x01",
    "ext": b"\xc7\x08\x05" + b"\x00" * 8,
    "reserved": b"\xc1",
    "not utf-8": b"\xa3\xed\xa0\x80",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_objects_are_refused_without_allocating(path: Path, name: str) -> None:
    """In the place of a field, and of the whole step; all checksums are right."""
    write_plan(path)
    header, *steps, _, _ = objects_of(path)
    assert isinstance(steps[0], dict)
    plain = msgpack.packb(steps[0]["sequences"])
    step = msgpack.packb(steps[0])
    for replaced in (HOSTILE[name], step.replace(plain, HOSTILE[name], 1)):
        rewrite(path, [header, replaced, steps[1]])
        tracemalloc.start()
        assert "its step 0 is not as the format says" in refused(path)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 20 * path.stat().st_size + 1_000_000


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_profiles_are_refused(path: Path, name: str) -> None:
    write_plan(path)
    header, *steps, _, _ = objects_of(path)
    assert isinstance(header, dict)
    marked = msgpack.packb(header | {"profile": "HERE"})
    rewrite(path, [marked.replace(msgpack.packb("HERE"), HOSTILE[name]), *steps])
    refused(path)


def test_hostile_indexes_are_refused(path: Path) -> None:
    write_plan(path)
    with open_plan(path) as reader:
        end = reader._index_offset
    data = path.read_bytes()[:end]
    good = msgspec.msgpack.decode(path.read_bytes()[end:-26], type=Index)
    size = len(good.offsets)
    for changes in (
        {"offsets": b""},
        {"offsets": b"", "crc32s": b""},
        {"offsets": good.offsets[:-1]},
        {"offsets": good.offsets + b"\x00", "crc32s": good.crc32s},
        {"offsets": b"\xff" * size},
        {"offsets": b"\x00" * size},
        {"offsets": good.offsets[:-8] + (end + 5).to_bytes(8)},
        {"crc32s": good.crc32s * 2},
        {"sha256": "0" * 64},
        {"totals": msgspec.structs.replace(good.totals, num_tokens=7)},
        {"totals": msgspec.structs.replace(good.totals, makespan_s=float("nan"))},
    ):
        index = msgspec.msgpack.encode(msgspec.structs.replace(good, **changes))
        path.write_bytes(data + index + make_trailer(end, index))
        refused(path)
    for offset in (0, end - 1, end + 1, len(data) + 10**6, 2**63, 2**64 - 1):
        index = msgspec.msgpack.encode(good)
        path.write_bytes(data + index + make_trailer(offset, index))
        refused(path)


PARTIAL = "plan.msgpack.partial"


def write_some(path: Path, header: Header, num_steps: int) -> None:
    """Write some steps, then be interrupted."""
    with PlanWriter(path, header) as writer:
        for k in range(num_steps):
            writer.append(make_step(header, k))
        raise KeyboardInterrupt


def interrupted(path: Path, header: Header, num_steps: int) -> bytes:
    """Return what an interrupt after some steps leaves."""
    with pytest.raises(KeyboardInterrupt):
        write_some(path, header, num_steps)
    assert os.listdir(path.parent) == [PARTIAL]
    return path.with_name(PARTIAL).read_bytes()


def resume(path: Path, header: Header) -> int:
    """Finish a plan; return how many steps were kept."""
    with PlanWriter(path, header, resume=True) as writer:
        kept = writer.num_steps
        for k in range(kept, header.num_steps):
            writer.append(make_step(header, k))
    return kept


@pytest.fixture
def header() -> Header:
    return make_header(num_stages=3, num_replicas=2, num_steps=5)


@pytest.fixture
def whole(tmp_path: Path, header: Header) -> bytes:
    """The bytes of a plan that nothing interrupted."""
    (tmp_path / "whole").mkdir()
    write_plan(tmp_path / "whole" / "plan", header)
    data = (tmp_path / "whole" / "plan").read_bytes()
    shutil.rmtree(tmp_path / "whole")
    return data


@pytest.mark.parametrize("num_steps", [0, 1, 3, 5])
def test_resume_keeps_complete_steps_and_gives_the_same_bytes(
    path: Path, header: Header, whole: bytes, num_steps: int
) -> None:
    interrupted(path, header, num_steps)
    assert resume(path, header) == num_steps
    assert path.read_bytes() == whole
    assert os.listdir(path.parent) == [path.name]


def test_resume_after_a_kill_at_any_byte(path: Path, header: Header, whole: bytes) -> None:
    """The whole file included: it was complete but not yet renamed."""
    with_ends = interrupted(path, header, 5)
    assert whole.startswith(with_ends)
    for size in {*range(0, len(whole), 37), len(with_ends), len(whole) - 26, len(whole)}:
        path.with_name(PARTIAL).write_bytes(whole[:size])
        kept = resume(path, header)
        assert path.read_bytes() == whole
        assert (size == len(whole)) <= (kept == 5)
    assert os.listdir(path.parent) == [path.name]


def test_resume_drops_what_a_power_cut_left(path: Path, header: Header, whole: bytes) -> None:
    """Zeros, rubbish, or a step twice instead of steps."""
    data = interrupted(path, header, 2)
    step = msgspec.msgpack.encode(make_step(header, 1))
    for rest in (b"\x00" * 5000, b"\xc1", b"\x91" * 5000, step, step[:-3]):
        path.with_name(PARTIAL).write_bytes(data + rest)
        assert resume(path, header) == 2
        assert path.read_bytes() == whole


def test_resume_without_a_beginning_starts_anew(path: Path, header: Header, whole: bytes) -> None:
    assert resume(path, header) == 0
    assert path.read_bytes() == whole


def test_resume_with_other_inputs_names_them_and_keeps_the_file(path: Path, header: Header) -> None:
    data = interrupted(path, header, 2)
    other = msgspec.structs.replace(header, seed=1, profile_sha256="1" * 64)
    with pytest.raises(
        PlanFileError,
        match=r"partial: was begun with another seed, profile_sha256; .* without --resume",
    ):
        resume(path, other)
    assert path.with_name(PARTIAL).read_bytes() == data


def test_resume_of_what_another_version_began_says_how_to_go_on(path: Path, header: Header) -> None:
    data = interrupted(path, header, 2)
    at = data.index(b"format_version") + len(b"format_version")
    for other in (data[:at] + b"\x03" + data[at + 1 :], data.replace(b"seed", b"deed", 1)):
        path.with_name(PARTIAL).write_bytes(other)
        with pytest.raises(
            PlanFileError,
            match=r"partial: was begun (by another infinipipe|with another format_version); "
            r"compile without --resume$",
        ):
            resume(path, header)


def test_without_resume_a_compile_starts_anew(path: Path, header: Header, whole: bytes) -> None:
    interrupted(path, header, 2)
    write_plan(path, header)
    assert path.read_bytes() == whole


def test_two_writers_of_one_plan_are_refused(path: Path, header: Header, whole: bytes) -> None:
    with PlanWriter(path, header) as writer:
        for resumes in (False, True):
            with pytest.raises(PlanFileError, match="another compile is writing it"):
                PlanWriter(path, header, resume=resumes).__enter__()
        for k in range(header.num_steps):
            writer.append(make_step(header, k))
    assert path.read_bytes() == whole


def test_a_full_disk_is_one_clear_error(
    path: Path, header: Header, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(
        PlanFileError, match="No space left on device; choose another file with --output"
    ):
        write_plan(path, header)
    assert os.listdir(path.parent) == []


def test_headers_that_would_fill_the_memory_are_not_decoded(path: Path) -> None:
    """Twenty million empty lists in a header of 20 MB would be more than a gigabyte."""
    write_plan(path)
    header, *steps = objects_of(path)[:-2]
    assert isinstance(header, dict)
    size = 20 * 2**20
    fields = b"".join(
        msgpack.packb(part) for pair in header.items() if pair[0] != "profile" for part in pair
    )
    profile = b"\x81\xa1a\xdd" + size.to_bytes(4) + b"\x90" * size
    start = b"\xde" + len(header).to_bytes(2)
    rewrite(path, [start + fields + msgpack.packb("profile") + profile, *steps])
    tracemalloc.start()
    message = refused(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "its header has 20972" in message
    assert peak < 3 * size


def test_plans_that_nobody_could_read_are_not_written(path: Path) -> None:
    profile = msgspec.msgpack.encode(
        {"model": make_model(), "dtype": "float32", "samples": [0] * 2**20}
    )
    header = make_header(
        profile=msgspec.Raw(profile), profile_sha256=hashlib.sha256(profile).hexdigest()
    )
    with pytest.raises(
        PlanFileError, match=r"the header has 104.* bytes, more than 1048576; .* with --profile"
    ):
        write_plan(path, header)
    assert os.listdir(path.parent) == []


def test_totals_are_finite(path: Path) -> None:
    write_plan(path)
    *objects, index, _ = objects_of(path)
    assert isinstance(index, dict)
    for name in ("makespan_s", "bound_s", "step_s"):
        rewrite(path, objects, index["totals"] | {name: float("inf")})
        assert "its totals are not finite" in refused(path)


def test_a_step_for_which_memory_does_not_suffice_is_one_line(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_plan(path)

    def full(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(msgspec.msgpack, "decode", full)
    assert "damaged" in refused(path)


def test_memory_does_not_grow_with_the_number_of_steps(path: Path) -> None:
    """The first round fills the interpreter's free lists, which stay."""
    peaks = []
    for num_steps in (1000, 200, 1000):
        header = make_header(num_steps=num_steps)
        step = make_step(header)
        tracemalloc.start()
        with PlanWriter(path, header) as writer:
            for k in range(num_steps):
                writer.append(msgspec.structs.replace(step, index=k))
        with open_plan(path) as reader:
            for _ in reader:
                pass
            reader.check_all()
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[2] < peaks[1] + 800 * 200  # a step has twice as many bytes
