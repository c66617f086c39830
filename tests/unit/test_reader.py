from __future__ import annotations

import json
import math
import os
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eagle_exporter import catalogue
from eagle_exporter.registry import layout as fmt
from eagle_exporter.registry.layout import Layout
from eagle_exporter.registry.reader import RankSnapshot, RegistryReader
from tests.ranks import Rank, RankProcess, make_plan, write_ended
from tests.unit.doubles import as_nobody, open_descriptors


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A good file with a few cycles in it."""
    root = tmp_path_factory.mktemp("good")
    rank = Rank(root, make_plan())
    rank.cycles(3)
    data = rank.writer.path.read_bytes()
    rank.writer.close()
    return data


def place(root: Path, data: bytes, name: str = "tp0-pp0-dp0.bin", server: str = "s") -> Path:
    (root / server).mkdir(parents=True, exist_ok=True)
    path = root / server / name
    path.write_bytes(data)
    return path


def parts(data: bytes) -> tuple[list[Any], dict[str, Any], bytes]:
    """Split a file into fixed header, JSON, and the two buffers."""
    fixed = list(fmt.HEADER.unpack_from(data))
    text = data[fmt.HEADER.size : fmt.HEADER.size + fixed[3]]
    return fixed, json.loads(text), data[fixed[4] :]


def assemble(fixed: list[Any], header: Any, buffers: bytes, *, text: bytes | None = None) -> bytes:
    encoded = json.dumps(header).encode() if text is None else text
    offset = -(-(fmt.HEADER.size + len(encoded)) // 64) * 64
    fixed = [*fixed[:3], len(encoded), offset, *fixed[5:]]
    return (fmt.HEADER.pack(*fixed) + encoded).ljust(offset, b"\0") + buffers


def with_value(data: bytes, name: str, value: float, index: int = 0) -> bytes:
    """Put a value into both buffers at slot `index` of a family."""
    fixed, header, buffers = parts(data)
    slots = fixed[5]
    start = next(family["slot"] for family in header["families"] if family["name"] == name)
    changed = bytearray(buffers)
    for buffer in range(2):
        struct.pack_into("<d", changed, 8 * (buffer * slots + start + index), value)
    return data[: fixed[4]] + bytes(changed)


def read_one(root: Path) -> RankSnapshot:
    snapshot = RegistryReader(root).read()
    assert snapshot.skipped == {}
    (rank,) = snapshot.ranks
    return rank


def reasons(root: Path) -> dict[str, str]:
    snapshot = RegistryReader(root).read()
    return {path.name: reason for path, reason in snapshot.skipped.items()}


# --- roots ---------------------------------------------------------------------------------------------
def test_a_root_that_is_not_there_yet_is_empty(tmp_path: Path) -> None:
    snapshot = RegistryReader(tmp_path / "later").read()
    assert snapshot.ranks == ()
    assert snapshot.skipped == {}


def test_a_root_that_is_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError):
        RegistryReader(tmp_path / "file").read()


def read_as_nobody(root: Path) -> str:
    def read() -> str:
        try:
            snapshot = RegistryReader(root).read()
        except PermissionError:
            return "PermissionError"
        return f"{len(snapshot.ranks)} {sorted(snapshot.skipped.values())}"

    return as_nobody(read)


def test_a_root_that_cannot_be_listed_is_an_error(shared_root: Path) -> None:
    shared_root.chmod(0o000)
    try:
        assert read_as_nobody(shared_root) == "PermissionError"
    finally:
        shared_root.chmod(0o755)


def test_a_directory_or_file_without_permission_is_counted_and_the_rest_is_shown(
    shared_root: Path, good: bytes
) -> None:
    place(shared_root, good, server="readable").chmod(0o644)
    place(shared_root, good, server="secret-file").chmod(0o000)
    place(shared_root, good, server="secret-directory").parent.chmod(0o000)
    try:
        assert read_as_nobody(shared_root) == "1 ['unreadable', 'unreadable']"
    finally:
        (shared_root / "secret-directory").chmod(0o755)


# --- files that are not ours -------------------------------------------------------------------------------
def bad_files(good: bytes) -> dict[str, tuple[bytes, str]]:
    fixed, header, buffers = parts(good)

    def with_family(**changes: Any) -> bytes:
        families = [{**header["families"][0], **changes}, *header["families"][1:]]
        return assemble(fixed, {**header, "families": families}, buffers)

    def with_fixed(position: int, value: Any) -> bytes:
        changed = list(fixed)
        changed[position] = value
        return fmt.HEADER.pack(*changed) + good[fmt.HEADER.size :]

    big = 10**400
    huge_text = json.dumps(header).replace("0.5", str(big), 1).encode()
    assert str(big).encode() in huge_text
    return {
        "empty": (b"", "truncated"),
        "one-byte": (b"E", "truncated"),
        "half-a-header": (good[:40], "truncated"),
        "header-only": (good[: fmt.HEADER.size], "truncated"),
        "half-the-json": (good[:500], "truncated"),
        "half-the-values": (good[: fixed[4] + 8 * fixed[5]], "truncated"),
        "one-byte-short": (good[:-1], "truncated"),
        "foreign": (b"#!/bin/sh\n" + b"x" * 4096, "foreign"),
        "zeros": (bytes(65536), "foreign"),
        "major-0": (with_fixed(1, 0), "major_version"),
        "major-2": (with_fixed(1, 2), "major_version"),
        "long-header": (with_fixed(3, 2**31), "corrupt"),
        "offset-inside": (with_fixed(4, 64), "corrupt"),
        "offset-odd": (with_fixed(4, fixed[4] + 1), "corrupt"),
        "offset-beyond": (with_fixed(4, 2**62), "truncated"),
        "many-slots": (with_fixed(5, 2**61), "corrupt"),
        "no-json": (assemble(fixed, None, buffers, text=b"\xff\xfe{{{"), "corrupt"),
        "deep-json": (assemble(fixed, None, buffers, text=b"[" * 200_000), "corrupt"),
        "long-number": (assemble(fixed, None, buffers, text=b"[" + b"9" * 10_000 + b"]"), "corrupt"),
        "huge-bound": (assemble(fixed, None, buffers, text=huge_text), "corrupt"),
        "list": (assemble(fixed, [1, 2], buffers), "corrupt"),
        "no-labels": (assemble(fixed, {"families": []}, buffers), "corrupt"),
        "labels-number": (assemble(fixed, {**header, "labels": {"server": 5}}, buffers), "corrupt"),
        "labels-long": (assemble(fixed, {**header, "labels": {"server": "x" * 5000}}, buffers), "corrupt"),
        "labels-surrogate": (
            assemble(fixed, {**header, "labels": {"server": "\ud800"}}, buffers),
            "corrupt",
        ),
        "no-families": (assemble(fixed, {"labels": header["labels"]}, buffers), "corrupt"),
        "family-text": (assemble(fixed, {**header, "families": ["x"]}, buffers), "corrupt"),
        "family-twice": (
            assemble(fixed, {**header, "families": [header["families"][0]] * 2}, buffers),
            "corrupt",
        ),
        "family-name": (with_family(name='bad"name{}'), "corrupt"),
        "family-name-list": (with_family(name=[]), "corrupt"),
        "slot-negative": (with_family(slot=-1), "corrupt"),
        "slot-beyond": (with_family(slot=10**9), "corrupt"),
        "slot-huge": (with_family(slot=big), "corrupt"),
        "slot-text": (with_family(slot="0"), "corrupt"),
        "row-short": (with_family(labels=["reason"], series=[[]]), "corrupt"),
        "row-number": (with_family(labels=["reason"], series=[[1]]), "corrupt"),
        "row-twice": (with_family(labels=["reason"], series=[["a"], ["a"]]), "corrupt"),
        "label-name": (with_family(labels=["le gume"], series=[["a"]]), "corrupt"),
        "bounds-falling": (with_family(type="histogram", bounds=[2.0, 1.0]), "corrupt"),
        "bounds-nan": (with_family(type="histogram", bounds=[math.nan]), "corrupt"),
        "bounds-infinite": (with_family(type="histogram", bounds=[math.inf]), "corrupt"),
        "bounds-text": (with_family(type="histogram", bounds=["1"]), "corrupt"),
        "negative-counter": (with_value(good, "eagle_cycles_total", -1.0), "corrupt"),
        "infinite-counter": (with_value(good, "eagle_cycles_total", math.inf), "corrupt"),
        "negative-bucket": (with_value(good, "eagle_cycle_duration_seconds", -1.0), "corrupt"),
        "half-a-bucket": (with_value(good, "eagle_cycle_duration_seconds", 0.5), "corrupt"),
        "nan-bucket": (with_value(good, "eagle_cycle_duration_seconds", math.nan), "corrupt"),
        "infinite-sum": (
            with_value(good, "eagle_cycle_duration_seconds", math.inf, len(catalogue.DURATION_BUCKETS) + 1),
            "corrupt",
        ),
        "negative-sum": (
            with_value(good, "eagle_cycle_duration_seconds", -1.0, len(catalogue.DURATION_BUCKETS) + 1),
            "corrupt",
        ),
    }


def test_every_kind_of_bad_file_is_counted_by_its_reason_and_the_good_one_shown(tmp_path: Path, good: bytes) -> None:
    expected = {}
    for name, (data, reason) in bad_files(good).items():
        place(tmp_path, data, f"{name}.bin", server="bad")
        expected[f"{name}.bin"] = reason
    place(tmp_path, good)
    snapshot = RegistryReader(tmp_path).read()
    assert {path.name: reason for path, reason in snapshot.skipped.items()} == expected
    assert [rank.value("eagle_cycles_total") for rank in snapshot.ranks] == [3.0]
    assert set(expected.values()) <= set(catalogue.SKIPPED_REASONS)


def test_what_is_no_regular_file_is_counted_and_hangs_nothing(tmp_path: Path, good: bytes) -> None:
    path = place(tmp_path, good, "good.bin")
    (path.parent / "directory.bin").mkdir()
    (path.parent / "link.bin").symlink_to(path)
    (path.parent / "dangling.bin").symlink_to("/nowhere")
    os.mkfifo(path.parent / "fifo.bin")
    assert reasons(tmp_path) == dict.fromkeys(("directory.bin", "link.bin", "dangling.bin", "fifo.bin"), "not_a_file")


def test_other_names_are_none_of_our_business(tmp_path: Path, good: bytes) -> None:
    path = place(tmp_path, good)
    (path.parent / "control").write_text("off\n")
    (path.parent / ".tmp-tp1-pp0-dp0.bin-1").write_bytes(b"half")
    (path.parent / ".hidden.bin").write_bytes(b"")
    (tmp_path / "stray.bin").write_bytes(b"")
    (tmp_path / "linked").symlink_to(path.parent)
    assert read_one(tmp_path).directory == "s"


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_no_damage_to_a_file_breaks_the_reading_of_the_others(tmp_path: Path, good: bytes, data: st.DataObject) -> None:
    damaged = bytearray(good)
    for _ in range(data.draw(st.integers(1, 4))):
        if data.draw(st.booleans()):
            # Most damage to the values goes unnoticed; the headers are what decides.
            position = data.draw(st.integers(0, min(len(damaged), 4000) - 1)) if damaged else 0
            damaged[position : position + 1] = data.draw(st.binary(min_size=1, max_size=3))
        else:
            del damaged[data.draw(st.integers(0, len(damaged))) :]
        if not damaged:
            break
    place(tmp_path, bytes(damaged), "damaged.bin", server="damaged")
    place(tmp_path, good, server="good")
    snapshot = RegistryReader(tmp_path).read()
    shown = {rank.directory for rank in snapshot.ranks}
    # Where the damage left the labels alone, the two files claim the same series and the newer one wins.
    assert "good" in shown or "damaged" in shown
    assert len(snapshot.ranks) + len(snapshot.skipped) == 2


# --- versions ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("minor", [0, 1, 65535])
def test_any_minor_version_is_read(tmp_path: Path, good: bytes, minor: int) -> None:
    fixed, header, buffers = parts(good)
    fixed[2] = minor
    place(tmp_path, assemble(fixed, header, buffers))
    assert read_one(tmp_path).value("eagle_cycles_total") == 3


def test_the_next_minor_version_is_shown_without_what_is_not_known(tmp_path: Path, good: bytes) -> None:
    """A newer plugin: new families, a known family with one more label, more common labels, more header facts."""
    fixed, header, buffers = parts(good)
    fixed[2] = fmt.MINOR_VERSION + 1
    families = []
    for family in header["families"]:
        changed = {**family, "unit": "new"}
        if family["name"] == "eagle_wasted_rows_total":
            changed |= {"labels": ["why"], "series": [["finished"]]}
        if family["name"] == "eagle_running_requests":
            changed |= {"type": "counter"}
        families.append(changed)
    families += [
        {"name": "eagle_new_total", "type": "counter", "help": "", "labels": [], "slot": 0, "series": [[]]},
        {"name": "eagle_newer", "type": "stateset", "help": "", "labels": ["x"], "slot": 0, "series": [["y"]]},
    ]
    header = {**header, "families": families, "catalogue": "1.1", "more": [1], "labels": {**header["labels"], "z": "1"}}
    place(tmp_path, assemble(fixed, header, buffers))
    rank = read_one(tmp_path)
    names = {family.name for family in rank.families}
    assert not names & {"eagle_new_total", "eagle_newer", "eagle_wasted_rows_total", "eagle_running_requests"}
    assert rank.value("eagle_cycles_total") == 3
    assert rank.catalogue_version == "1.1"
    assert set(rank.labels) == set(catalogue.COMMON_LABELS)


def test_the_previous_minor_version_is_shown_without_what_it_did_not_have(tmp_path: Path, good: bytes) -> None:
    """An older plugin: fewer families, fewer label values, a common label that did not exist."""
    fixed, header, buffers = parts(good)
    header["families"] = [family for family in header["families"] if not family["name"].startswith("eagle_batch")]
    for family in header["families"]:
        if family["name"] == "eagle_phase_duration_seconds":
            family["series"] = family["series"][:2]
    del header["labels"]["engine_type"]
    header.pop("catalogue")
    place(tmp_path, assemble(fixed, header, buffers))
    rank = read_one(tmp_path)
    assert rank.value("eagle_cycles_total") == 3
    assert rank.labels["engine_type"] == ""
    assert rank.family("eagle_batch_cycles_total") is None
    phases = rank.family("eagle_phase_duration_seconds")
    assert phases is not None
    assert len(phases.series) == 2


def test_help_and_labels_come_from_this_catalogue_not_from_the_file(tmp_path: Path, good: bytes) -> None:
    fixed, header, buffers = parts(good)
    for family in header["families"]:
        family["help"] = "bad\nhelp"
    place(tmp_path, assemble(fixed, header, buffers))
    family = read_one(tmp_path).family("eagle_cycles_total")
    assert family is not None
    assert family.help == catalogue.BY_NAME["eagle_cycles_total"].help


# --- values --------------------------------------------------------------------------------------------
def test_nan_means_that_the_series_does_not_exist(tmp_path: Path, good: bytes) -> None:
    place(tmp_path, with_value(good, "eagle_running_requests", math.nan))
    rank = read_one(tmp_path)
    assert rank.value("eagle_running_requests") is None
    assert rank.family("eagle_running_requests") is None


def test_a_negative_or_infinite_gauge_is_a_value(tmp_path: Path, good: bytes) -> None:
    place(tmp_path, with_value(good, "eagle_kv_pool_tokens", -5.0))
    assert read_one(tmp_path).value("eagle_kv_pool_tokens") == -5.0


def test_what_was_written_is_read(tmp_path: Path) -> None:
    rank = Rank(tmp_path, make_plan(server="a/b", tp_rank=5))
    rank.set("eagle_kernel_last_capture_timestamp_seconds", 1.7643e9)
    rank.cycles(7, batch_size=3, accepted=2)
    snapshot = read_one(tmp_path)
    assert snapshot.labels == dict(rank.plan.labels)
    assert snapshot.key == tuple(rank.plan.labels.values())
    assert snapshot.value("eagle_drafts_total") == 21
    assert snapshot.value("eagle_batch_accepted_tokens_total", "3-4", "3") == 42
    family = snapshot.family("eagle_accept_length_tokens")
    assert family is not None
    assert family.series[0].buckets == (0, 0, 21, 0, 0)
    assert family.series[0].value == 63
    layout = Layout(rank.plan)
    shown = sum(
        len(family.bounds) + 3 if family.kind == "histogram" else 1
        for family in snapshot.families
        for _ in family.series
    )
    assert shown == layout.series_count()


# --- lives ---------------------------------------------------------------------------------------------
def test_a_rank_is_alive_while_its_writer_is(tmp_path: Path) -> None:
    reader = RegistryReader(tmp_path)
    with RankProcess(tmp_path, {}) as process:
        assert [rank.alive for rank in reader.read().ranks] == [True]
        process.kill()
        assert [rank.alive for rank in reader.read().ranks] == [False]


def test_a_restarted_rank_begins_at_zero_and_is_never_added_to_its_past(tmp_path: Path) -> None:
    reader = RegistryReader(tmp_path)
    with RankProcess(tmp_path, {}) as process:
        process.cycles(1000)
        assert [rank.value("eagle_cycles_total") for rank in reader.read().ranks] == [1000]
    before = reader.read().ranks[0]
    with RankProcess(tmp_path, {}) as process:
        (after,) = reader.read().ranks
        assert after.value("eagle_cycles_total") == 0
        assert after.created > before.created
        process.cycles(3)
        assert [rank.value("eagle_cycles_total") for rank in reader.read().ranks] == [3]


def test_of_two_files_with_the_same_labels_the_newer_is_shown_and_the_other_counted(tmp_path: Path) -> None:
    write_ended(tmp_path, {}, cycles=5)
    (old,) = tmp_path.glob("*/*.bin")
    (tmp_path / "renamed").mkdir()
    shutil.move(old, tmp_path / "renamed" / old.name)
    with RankProcess(tmp_path, {}) as process:
        process.cycles(2)
        snapshot = RegistryReader(tmp_path).read()
    assert [(rank.value("eagle_cycles_total"), rank.alive) for rank in snapshot.ranks] == [(2, True)]
    assert list(snapshot.skipped.values()) == ["duplicate"]
    assert next(iter(snapshot.skipped)).parent.name == "renamed"


def test_a_new_file_that_got_the_number_of_the_old_one_is_a_new_life(tmp_path: Path, good: bytes) -> None:
    """File systems use the inode number of a removed file again, often for the very next one."""
    reader = RegistryReader(tmp_path)
    path = place(tmp_path, good)
    (first,) = reader.read().ranks
    created = struct.unpack_from("<Q", good, 40)[0]
    with path.open("r+b") as file:  # the same inode and the same header text, as after a restart of the same server
        file.seek(40)
        file.write(struct.pack("<Q", created + 5_000_000_000))
    (second,) = reader.read().ranks
    assert second.inode == first.inode
    assert second.created - first.created == pytest.approx(5.0, abs=0.001)


def test_a_new_layout_under_the_number_of_the_old_file_is_read_as_what_it_is(tmp_path: Path) -> None:
    reader = RegistryReader(tmp_path)
    write_ended(tmp_path, {"tiers": (0, 3)}, cycles=4)
    (path,) = tmp_path.glob("*/*.bin")
    assert reader.read().ranks[0].value("eagle_cycles_total") == 4
    write_ended(tmp_path / "other", {"tiers": (1, 2, 5), "recording": False}, cycles=6)
    (other,) = (tmp_path / "other").glob("*/*.bin")
    data = other.read_bytes()
    shutil.rmtree(tmp_path / "other")
    inode = path.stat().st_ino
    path.write_bytes(data)
    assert path.stat().st_ino == inode
    (rank,) = reader.read().ranks
    assert rank.value("eagle_cycles_total") == 6
    assert rank.value("eagle_batch_cycles_total", "1", "5") == 6


def test_a_file_truncated_under_a_live_reader_is_counted_and_comes_back(tmp_path: Path, good: bytes) -> None:
    reader = RegistryReader(tmp_path)
    path = place(tmp_path, good)
    assert len(reader.read().ranks) == 1
    for length in (len(good) - 1, len(good) // 2, 100, 10, 0):
        with path.open("r+b") as file:
            file.truncate(length)
        snapshot = reader.read()
        assert snapshot.ranks == ()
        assert list(snapshot.skipped.values()) == ["truncated"]
    path.write_bytes(good)
    assert len(reader.read().ranks) == 1


def test_a_file_truncated_in_the_middle_of_a_read_is_counted(
    tmp_path: Path, good: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = place(tmp_path, good)
    original = os.pread

    def pread(descriptor: int, size: int, offset: int) -> bytes:
        if offset == fmt.SEQUENCE_OFFSET and size == 8:
            os.truncate(path, len(good) // 2)
        return original(descriptor, size, offset)

    monkeypatch.setattr(os, "pread", pread)
    assert reasons(tmp_path) == {path.name: "truncated"}


def test_a_buffer_that_is_overwritten_while_it_is_read_is_read_again(
    tmp_path: Path, good: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two commits come between: the first makes the other buffer current, the second is half way into this one."""
    path = place(tmp_path, good)
    fixed, _, _ = parts(good)
    offset, slots, sequence = fixed[4], fixed[5], fixed[6]
    original, disturbed = os.pread, False

    def pread(descriptor: int, size: int, position: int) -> bytes:
        nonlocal disturbed
        if size == 8 * slots and not disturbed:
            disturbed = True
            with path.open("r+b") as file:
                file.seek(offset + 8 * slots * ((sequence + 1) & 1))
                file.write(good[offset + 8 * slots * (sequence & 1) :][: 8 * slots])
                file.seek(offset + 8 * slots * (sequence & 1))
                file.write(struct.pack("<d", 99.0) * (slots // 2))
                file.seek(fmt.SEQUENCE_OFFSET)
                file.write(struct.pack("<Q", sequence + 1))
        return original(descriptor, size, position)

    monkeypatch.setattr(os, "pread", pread)
    assert read_one(tmp_path).value("eagle_cycles_total") == 3
    assert disturbed


def test_a_file_that_changes_faster_than_it_can_be_read_is_counted_not_shown_torn(
    tmp_path: Path, good: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = place(tmp_path, good)
    original = os.pread
    sequence = iter(range(10**6))

    def pread(descriptor: int, size: int, offset: int) -> bytes:
        if offset == fmt.SEQUENCE_OFFSET and size == 8:
            return struct.pack("<Q", next(sequence))
        return original(descriptor, size, offset)

    monkeypatch.setattr(os, "pread", pread)
    assert reasons(tmp_path) == {path.name: "unreadable"}


def test_a_file_that_vanishes_during_the_read_is_no_error(
    tmp_path: Path, good: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = place(tmp_path, good)
    original = os.listdir

    def listdir(directory: Path) -> list[str]:
        names = original(directory)
        path.unlink(missing_ok=True)
        return names

    monkeypatch.setattr(os, "listdir", listdir)
    snapshot = RegistryReader(tmp_path).read()
    assert snapshot.ranks == ()
    assert snapshot.skipped == {}


def test_a_read_leaves_no_descriptor_open(tmp_path: Path, good: bytes) -> None:
    for name, (data, _) in bad_files(good).items():
        place(tmp_path, data, f"{name}.bin")
    reader = RegistryReader(tmp_path)
    reader.read()
    before = open_descriptors()
    for _ in range(3):
        reader.read()
    assert open_descriptors() <= before
