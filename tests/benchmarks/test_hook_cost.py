from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def printed(*command: str) -> str:
    """Return what an interpreter prints that runs in the project's root; it has to end well."""
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_benchmark_prints_both_sides_and_their_ratio_for_every_batch_size() -> None:
    """That it runs and measures the same; how fast a busy test machine is says nothing."""
    text = printed("-m", "tests.benchmarks.hook_cost", "--cycles", "20")
    rows = re.findall(r"^ +(\d+) +([\d.]+) +([\d.]+) +([\d.]+)$", text, re.MULTILINE)
    assert [int(row[0]) for row in rows] == [1, 8, 64]
    for _, ours, theirs, ratio in rows:
        assert float(ours) > 0
        assert float(theirs) > 0
        assert abs(float(ratio) - float(theirs) / float(ours)) < 0.2 + 0.02 * float(ratio)


def test_both_sides_make_the_same_observations(tmp_path: Path) -> None:
    """Otherwise the ratio would compare nothing."""
    code = """
import sys
from pathlib import Path
from tests.benchmarks.hook_cost import Multiprocess, Registry
root = Path(sys.argv[1])
for name in ("ours", "theirs"):
    (root / name).mkdir()
ours, theirs = Registry(root / "ours"), Multiprocess(root / "theirs")
run_ours, run_theirs = ours.cycle(8), theirs.cycle(8)
start = list(ours.recorder.values)
run_ours()
run_ours()
run_theirs()
touched = set()
for family in ours.recorder.layout.families:
    before, after = start[family.start:family.end], list(ours.recorder.values[family.start:family.end])
    if any(new != old and new == new for old, new in zip(before, after)):
        touched.add(family.metric.name)
# In one cycle of sixteen the parts of the overhead are measured too; not in the one that is copied here.
touched -= {name for name in touched if name.startswith("eagle_verify_overhead")}
print(sorted(touched))
print(sorted(theirs._families))
"""
    ours, theirs = printed("-c", code, str(tmp_path)).splitlines()
    assert ours == theirs


def test_the_cost_while_switched_off_is_measured_and_printed() -> None:
    text = printed("-m", "tests.benchmarks.switched_off", "--calls", "50")
    rows = dict(re.findall(r"^ +(\w[\w ]*\w) +(-?\d+)$", text, re.MULTILINE))
    assert len(rows) == 9
    assert int(rows["all together"]) > 0


def test_what_all_wrappers_add_to_a_cycle_is_measured_and_printed() -> None:
    text = printed("-m", "tests.benchmarks.wrapper_path", "--cycles", "20")
    rows = re.findall(r"^ +(\d+) +(-?[\d.]+) +(-?[\d.]+) +(-?[\d.]+)$", text, re.MULTILINE)
    assert [int(row[0]) for row in rows] == [1, 16, 64]
    assert all(float(timed) > 0 for _, _, timed, _ in rows)
