from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_exporter import catalogue, settings
from eagle_exporter.settings import PREFIX, SettingError, Settings, parse_baseline, parse_buckets

GOOD = {
    "ENABLED": ("1", "enabled", "1"),
    "DIR": ("/run/eagle", "directory", Path("/run/eagle")),
    "SERVER": ("node-a:30000", "server", "node-a:30000"),
    "EMBED": ("0", "embed", False),
    "LISTEN": ("127.0.0.1:9999", "listen", "127.0.0.1:9999"),
    "CLOCK": ("HOST", "clock", "host"),
    "SAMPLE_EVERY": ("4", "sample_every", 4),
    "HISTOGRAMS": ("all", "histograms", "all"),
    "DRAFT_STEP_EVENTS": ("0", "draft_step_events", False),
    "BUCKETS": ("0.001,0.01", "buckets", (0.001, 0.01)),
    "BASELINE_DECODE_SECONDS": ("1=0.0111,8=0.0135", "baseline", {"1": 0.0111, "5-8": 0.0135}),
    "GROUP": ("metrics", "group", "metrics"),
    "PROFILE_EVERY": ("6h", "profile_every", 21600.0),
    "KERNEL_CLASSES": ("/etc/eagle/classes", "kernel_classes", Path("/etc/eagle/classes")),
    "LOG_LEVEL": ("debug", "log_level", "debug"),
}

BAD = [
    ("ENABLED", "yes"),
    ("DIR", "relative/path"),
    ("SERVER", "bad\x07name"),
    ("SERVER", "x" * 201),
    ("EMBED", "true"),
    ("CLOCK", "cuda"),
    ("SAMPLE_EVERY", "0"),
    ("SAMPLE_EVERY", "-3"),
    ("SAMPLE_EVERY", "often"),
    ("SAMPLE_EVERY", "1.5"),
    ("SAMPLE_EVERY", "²"),
    ("HISTOGRAMS", "none"),
    ("DRAFT_STEP_EVENTS", "on"),
    ("BUCKETS", "1,"),
    ("BUCKETS", "few"),
    ("BUCKETS", "1,0.5"),
    ("BUCKETS", "1,1"),
    ("BUCKETS", "0,1"),
    ("BUCKETS", "-1,1"),
    ("BUCKETS", "nan"),
    ("BUCKETS", "1,inf"),
    ("BUCKETS", ",".join(str(i) for i in range(1, 202))),
    ("BASELINE_DECODE_SECONDS", "0.0111"),
    ("BASELINE_DECODE_SECONDS", "1="),
    ("BASELINE_DECODE_SECONDS", "=1"),
    ("BASELINE_DECODE_SECONDS", "0=0.1"),
    ("BASELINE_DECODE_SECONDS", "1=-0.1"),
    ("BASELINE_DECODE_SECONDS", "1=nan"),
    ("BASELINE_DECODE_SECONDS", "1=inf"),
    ("BASELINE_DECODE_SECONDS", "5=0.1,6=0.2"),
    ("BASELINE_DECODE_SECONDS", "²=0.1"),
    ("PROFILE_EVERY", "0"),
    ("PROFILE_EVERY", "599"),
    ("PROFILE_EVERY", "5m"),
    ("PROFILE_EVERY", "infd"),
    ("PROFILE_EVERY", "h"),
    ("KERNEL_CLASSES", "classes"),
    ("PROFILE_EVERY", "never"),
    ("LOG_LEVEL", "loud"),
]


@pytest.mark.parametrize("name", GOOD)
def test_a_good_value_is_taken(name: str) -> None:
    text, attribute, value = GOOD[name]
    read = settings.read({PREFIX + name: f" {text} "}, strict=True)
    assert getattr(read, attribute) == value
    assert read.problems == ()
    untouched = {field.name for field in dataclasses.fields(Settings)} - {attribute}
    assert all(getattr(read, other) == getattr(Settings(), other) for other in untouched)


@pytest.mark.parametrize(("name", "text"), BAD)
def test_a_wrong_value_is_refused_by_the_exporter_with_name_and_value(name: str, text: str) -> None:
    with pytest.raises(SettingError) as error:
        settings.read({PREFIX + name: text}, strict=True)
    assert str(error.value).startswith(f"{PREFIX}{name}={text!r}: ")
    # What is allowed, in words: not what Python says of it.
    assert "literal" not in str(error.value)
    assert "convert" not in str(error.value)


@pytest.mark.parametrize(("name", "text"), BAD)
def test_a_wrong_value_in_a_server_is_noted_and_the_default_used(name: str, text: str) -> None:
    read = settings.read({PREFIX + name: text})
    assert dataclasses.replace(read, problems=()) == Settings()
    (problem,) = read.problems
    assert name in problem
    assert "default" in problem


def test_several_wrong_values_are_all_noted() -> None:
    read = settings.read({PREFIX + "CLOCK": "sundial", PREFIX + "EMBED": "maybe", PREFIX + "SERVER": "good"})
    assert len(read.problems) == 2
    assert read.server == "good"


@pytest.mark.parametrize("text", ["", "   "])
@pytest.mark.parametrize("name", GOOD)
def test_an_empty_variable_is_the_default(name: str, text: str) -> None:
    assert settings.read({PREFIX + name: text}, strict=True) == Settings()


def test_every_variable_of_the_design_is_read() -> None:
    read = settings.read({PREFIX + name: text for name, (text, _, _) in GOOD.items()}, strict=True)
    assert {attribute for _, attribute, _ in GOOD.values()} == {
        field.name for field in dataclasses.fields(Settings)
    } - {"problems"}
    for _, attribute, value in GOOD.values():
        assert getattr(read, attribute) == value


def test_the_environment_of_the_process_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PREFIX + "SERVER", "from the process")
    assert settings.read().server == "from the process"


@given(st.lists(st.floats(1e-9, 1e6), min_size=1, max_size=50, unique=True))
def test_bucket_bounds_survive_their_text(bounds: list[float]) -> None:
    ordered = tuple(sorted(bounds))
    assert parse_buckets(",".join(repr(bound) for bound in ordered)) == ordered


@given(st.dictionaries(st.sampled_from(catalogue.BATCH_SIZES), st.floats(1e-6, 100), min_size=1))
def test_a_baseline_by_label_survives_its_text(baseline: dict[str, float]) -> None:
    assert parse_baseline(",".join(f"{size}={seconds!r}" for size, seconds in baseline.items())) == baseline


@given(st.text(max_size=30), st.sampled_from(sorted(GOOD)))
def test_no_text_makes_the_hook_side_raise(text: str, name: str) -> None:
    read = settings.read({PREFIX + name: text})
    assert all(0 < seconds < math.inf for seconds in read.baseline.values())
    assert read.sample_every is None or read.sample_every >= 1
