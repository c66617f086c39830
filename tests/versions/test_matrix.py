"""Every hook point of every family, in the real wheel of every version that the family serves."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

import pytest

from eagle_exporter import catalogue
from eagle_exporter.hooks import acceptance, points
from eagle_exporter.hooks.points import Family
from tests.versions import fields, matrix, wheels

FAMILIES = [*points.FAMILIES, points.GENERIC]
EAGLE = [
    configuration
    for configuration in matrix.CONFIGURATIONS
    if configuration.algorithm in ("EAGLE", "EAGLE3") and not configuration.multi_layer
]


def test_the_versions_are_all_from_0_5_6_to_0_5_23() -> None:
    assert list(wheels.VERSIONS) == [f"0.5.{patch}" for patch in range(6, 24)]
    days = [matrix.version(version).released for version in wheels.VERSIONS]
    assert days == sorted(days)


@pytest.mark.parametrize("version", wheels.VERSIONS)
def test_every_hook_point_resolves_and_takes_what_is_read(version: str) -> None:
    examined = matrix.version(version)
    assert examined.problems == []
    assert len(examined.places) > 30


@pytest.mark.parametrize("version", wheels.VERSIONS)
def test_every_field_that_is_read_is_there(version: str) -> None:
    assert {family: gone for family, gone in matrix.version(version).fields.items() if gone} == {}


@pytest.mark.parametrize("version", wheels.VERSIONS)
def test_accepted_tokens_have_the_name_that_the_hooks_expect(version: str) -> None:
    """Three names in turn, of which a version has one; 0.5.6 has none on the result."""
    patch = int(version.rpartition(".")[2])
    turn = 0 if patch >= 12 else 1 if patch == 11 else 2
    source = wheels.source(version)
    names = acceptance._CORRECT_DRAFTS
    found = [source.has_attribute("sglang.srt.managers.utils:GenerationBatchResult", name) for name in names]
    assert found.index(True) == turn if patch > 6 else not any(found)
    counters = [source.has_attribute("sglang.srt.managers.schedule_batch:Req", name) for name in acceptance._COUNTERS]
    # V1 reads them, which is gone from 0.5.13 on.
    assert patch > 13 or counters.index(True) == turn


@pytest.mark.parametrize("version", wheels.VERSIONS)
def test_every_configuration_of_eagle_is_served_by_exactly_one_family(version: str) -> None:
    examined = matrix.version(version)
    for configuration in EAGLE:
        worker = examined.workers[configuration]
        assert worker is not None, configuration
        shapes = [family for family in points.FAMILIES if version in matrix.claimed(family)]
        serving = [family.name for family in shapes if family.worker == worker]
        assert serving == [examined.families[worker]], configuration


@pytest.mark.parametrize("version", wheels.VERSIONS)
def test_every_worker_with_a_draft_model_has_a_family(version: str) -> None:
    examined = matrix.version(version)
    generic = {
        configuration.algorithm
        for configuration, worker in examined.workers.items()
        if worker and examined.families[worker] == points.GENERIC.name
    }
    assert generic == {"NGRAM"}


@pytest.mark.parametrize("version", wheels.VERSIONS)
def test_the_one_worker_that_python_cannot_import_is_known(version: str) -> None:
    """SGLang's multi-layer V1, seen in 0.5.10 and 0.5.12: ``NameError: name 'ModelRunner' is not defined``."""
    broken = {worker.partition(":")[2] for worker in matrix.version(version).unimportable}
    assert broken == ({"MultiLayerEagleWorker"} if version in ("0.5.9", "0.5.10", "0.5.11", "0.5.12") else set())


@pytest.mark.parametrize("version", wheels.VERSIONS)
def test_the_families_that_are_expected_are_those_that_serve(version: str) -> None:
    examined = matrix.version(version)
    assert set(examined.present) == set(examined.families.values()) - {points.GENERIC.name}


@pytest.mark.parametrize("version", wheels.VERSIONS)
def test_no_function_is_wrapped_twice_for_one_worker(version: str) -> None:
    examined = matrix.version(version)
    for worker in examined.families:
        twice = [name for name, count in Counter(place.defined for place in examined.of(worker)).items() if count > 1]
        assert twice == [], worker


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_family_serves_the_versions_that_it_names(family: Family) -> None:
    """And so no family, and no point of one, stands in the table for nothing."""
    assert matrix.served(family) == [version for version in wheels.VERSIONS if version in matrix.claimed(family)]
    assert matrix.served(family)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_hook_of_a_family_is_one_of_the_catalogue(family: Family) -> None:
    assert set(family.hooks) | set(family.knows) <= set(catalogue.HOOKS)
    assert not set(family.hooks) & set(family.knows)


@pytest.mark.parametrize("version", wheels.VERSIONS)
def test_the_hooks_find_where_to_begin(version: str) -> None:
    source = wheels.source(version)
    launch = [found for target in points.LAUNCH_ANCHORS if (found := source.function(target)) is not None]
    assert launch
    assert all(found.takes("server_args") for found in launch)
    assert source.function(points.SCHEDULER_INIT) is not None
    made = [points.CREATE_WORKER[0], points.CREATE_DRAFT_WORKER]
    assert sum(source.function(target) is not None for target in made) == 1
    assert matrix.version(version).plugins == (int(version.rpartition(".")[2]) >= 11)


# --- it can fail -------------------------------------------------------------------------------------------
def newest(family: Family) -> str:
    return matrix.served(family)[-1]


def renames() -> list[tuple[str, str]]:
    """Return every function that is hooked, in the newest version of each family: (version, definition)."""
    found = dict.fromkeys(
        (newest(family), place.defined)
        for family in FAMILIES
        for (worker, _), place in matrix.version(newest(family)).places.items()
        if matrix.version(newest(family)).families[worker] == family.name
    )
    return list(found)


def test_each_function_renamed_in_turn_is_told_and_nothing_else() -> None:
    """An SGLang from the future, as far as its text goes: the same families, and down is what was renamed."""
    tried = renames()
    assert len(tried) > 60
    for version in dict.fromkeys(version for version, _ in tried):
        before = matrix.version(version)
        wheel = wheels.source(version)
        matrix.places(wheel, before.families)  # so that only the changed files are parsed below
        for defined in [defined for each, defined in tried if each == version]:
            families, places = matrix.places(matrix.renamed(wheel, defined), before.families)
            assert families == before.families, f"{version}: {defined}"
            down = {key: place.problem for key, place in places.items() if place.problem}
            assert down.keys() == {key for key, place in before.places.items() if place.defined == defined}, defined
            assert all(defined.rpartition(":")[2].rpartition(".")[2] in problem for problem in down.values())


def test_each_parameter_that_is_gone_is_told() -> None:
    before = matrix.version(wheels.VERSIONS[-1])
    wheel = wheels.source(wheels.VERSIONS[-1])
    reading = [(worker, place.point) for (worker, _), place in before.places.items() if place.point.reads]
    assert len(reading) > 10
    for worker, point in reading:
        family = matrix.BY_NAME[before.families[worker]]
        asked = replace(point, reads=(*point.reads, "no_such_parameter"))
        place = matrix.place(wheel, asked, worker if family.of_worker(point) else "")
        assert place.missing == ("no_such_parameter",)
        assert "has no parameter no_such_parameter" in place.problem


def test_each_field_renamed_in_turn_is_told_and_nothing_else() -> None:
    wheel = wheels.source(wheels.VERSIONS[-1])
    files: dict[tuple[str, str], list[str]] = {}
    for read in fields.reads_of(points.V2):
        owner, _, name = read.places[0].rpartition(".")
        modules = [base.partition(":")[0] for base in wheel.bases(owner) if wheel.has_attribute(base, name)]
        # In a file that has two classes with it, both are renamed. What a class has from elsewhere too stays.
        if set(modules) == {modules[0]}:
            files.setdefault((modules[0].replace(".", "/") + ".py", name), []).extend(read.places)
    assert len(files) > 20
    for (path, name), places in files.items():
        text = (wheel.text(path) or b"").decode()
        changed = wheel.changed({path: re.sub(rf"\b{name}\b", f"{name}_renamed", text).encode()})
        assert fields.missing(changed, points.V2) == tuple(places)
