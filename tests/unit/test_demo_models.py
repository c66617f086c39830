"""The demo's model pair: its tables are sound, and the expected accept lengths follow from them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import accumulate, pairwise
from pathlib import Path

import pytest

from eagle_exporter.demo import answers

CHAINS = [(1, 1, 2), (2, 1, 3), (3, 1, 4), (5, 1, 6), (10, 1, 11)]
TREES = [(2, 2, 4), (3, 2, 6), (3, 4, 8), (5, 4, 16), (5, 8, 32)]


def lengths(prompt: list[int], count: int, shape: tuple[int, int, int]) -> list[int]:
    steps, topk, tokens = shape
    return answers.expected_accept_lengths(prompt, count, num_steps=steps, topk=topk, num_draft_tokens=tokens)


def test_target_visits_every_token_but_the_ends_of_a_sequence() -> None:
    assert sorted(answers.expected_tokens([5], 62)) == list(range(2, 64))
    assert answers.expected_tokens([5], 63)[-1] == answers.expected_tokens([5], 1)[0]
    assert answers.expected_tokens([9, 0], 1) == answers.expected_tokens([0], 1)


@pytest.mark.parametrize("token", range(answers.VOCABULARY_SIZE))
def test_draft_distribution_is_one(token: int) -> None:
    distribution = answers.draft_distribution(token)
    probabilities = [probability for _, probability in distribution]
    assert sorted(t for t, _ in distribution) == list(range(answers.VOCABULARY_SIZE))
    assert sum(probabilities) == pytest.approx(1.0)
    assert all(a > b for a, b in pairwise(probabilities))


@pytest.mark.parametrize("shape", CHAINS[1:4])
def test_chain_has_every_accept_length(shape: tuple[int, int, int]) -> None:
    assert set(lengths([5], 500, shape)) == set(range(1, shape[0] + 2))


@pytest.mark.parametrize("shape", CHAINS + TREES)
def test_cycles_produce_the_requested_tokens(shape: tuple[int, int, int]) -> None:
    for count in (1, 2, 3, 40):
        for token in range(answers.VOCABULARY_SIZE):
            sums = list(accumulate(lengths([token], count, shape), initial=1))
            assert sums[-1] >= count
            assert all(before < count for before in sums[:-1])


def test_chain_accepts_while_the_drafts_first_choice_is_right() -> None:
    for token in range(answers.VOCABULARY_SIZE):
        run = 0
        current = token
        while run < 5 and answers.draft_distribution(current)[0][0] == answers.next_token(current):
            run += 1
            current = answers.next_token(current)
        assert answers.accept_length(token, num_steps=5, topk=1, num_draft_tokens=6) == run + 1


def test_tree_accepts_more_than_a_chain() -> None:
    chain = lengths([5], 2000, (3, 1, 4))
    tree = lengths([5], 2000, (3, 4, 8))
    assert len(tree) < len(chain)
    # Where the draft's second choice is right a tree goes on; where it is not in the top 4 nothing does.
    gains = {
        answers.accept_length(token, num_steps=3, topk=4, num_draft_tokens=8)
        - answers.accept_length(token, num_steps=3, topk=1, num_draft_tokens=4)
        for token in range(2, 64)
    }
    # A tree of eight nodes is also shallower than a chain on some paths.
    assert {0, 1, 2} <= gains


@pytest.mark.parametrize("shape", TREES)
def test_no_tree_hangs_on_a_tie(shape: tuple[int, int, int]) -> None:
    steps, topk, tokens = shape
    # float32 scores of SGLang are good to about 1e-6.
    assert answers.smallest_clearance(num_steps=steps, topk=topk, num_draft_tokens=tokens) > 1e-5


@pytest.mark.parametrize(
    "shape", [(0, 1, 1), (3, 0, 4), (3, 1, 8), (2, 2, 99)], ids=["steps", "topk", "chain", "nodes"]
)
def test_impossible_shapes_are_refused(shape: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match=r"num_steps|num_draft_tokens|nodes"):
        lengths([5], 9, shape)


def test_histogram_counts_drafts_without_the_bonus() -> None:
    assert answers.accept_histogram([1, 3, 3, 4]) == [1, 0, 2, 1]
    assert answers.accept_histogram([]) == []


def test_importing_the_demo_needs_neither_torch_nor_sglang() -> None:
    script = (
        "import sys; sys.modules['torch'] = sys.modules['sglang'] = sys.modules['safetensors'] = None\n"
        "import eagle_exporter.demo.answers, eagle_exporter.demo.models, eagle_exporter.demo.sglang_server\n"
        "import eagle_exporter.demo.traffic, eagle_exporter.cli.demo\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_stand_ins_are_not_importable_as_part_of_the_package() -> None:
    script = (
        "import importlib\n"
        "for name in ('sgl_kernel', 'torchvision'):\n"
        "    try:\n"
        "        importlib.import_module('eagle_exporter.demo.cpu_standins.' + name)\n"
        "    except ImportError:\n"
        "        continue\n"
        "    raise SystemExit(name)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def sglang_python() -> str:
    paths = Path(__file__).resolve().parents[2] / ".venvs" / "paths.json"
    try:
        pythons: dict[str, str] = json.loads(paths.read_text())["sglang"]
    except (OSError, KeyError):
        pytest.skip("no SGLang environment (make test prepares one)")
    return next(iter(pythons.values()))


def test_pair_is_built_once_and_replaced_when_it_is_another(tmp_path: Path) -> None:
    script = (
        "import sys, pathlib, json; from eagle_exporter.demo.models import build_pair\n"
        "d = pathlib.Path(sys.argv[1]) / 'pair'\n"
        "def stamp(): return (d / 'draft' / 'model.safetensors').stat().st_mtime_ns\n"
        "pair = build_pair(d); first = stamp()\n"
        "assert pair.target.is_dir() and pair.draft.is_dir()\n"
        "build_pair(d); assert stamp() == first\n"
        "(d / 'pair.json').write_text(json.dumps({'fingerprint': 'of another version'}))\n"
        "build_pair(d); assert stamp() != first\n"
        "assert [p.name for p in d.parent.iterdir()] == ['pair']\n"
    )
    subprocess.run([sglang_python(), "-c", script, str(tmp_path)], check=True, env=dict(os.environ))


def test_pair_computes_what_the_tables_say(tmp_path: Path) -> None:
    """The draft layer's arithmetic, done by hand in float32 over two steps, gives the distributions."""
    script = """
import sys, pathlib, torch
from safetensors.torch import load_file
from eagle_exporter.demo import answers
from eagle_exporter.demo.models import build_pair
pair = build_pair(pathlib.Path(sys.argv[1]) / "pair")
w = load_file(pair.draft / "model.safetensors")

def norm(x):
    return x / torch.sqrt((x * x).mean() + 1e-5)

def step(token, hidden):
    inputs = torch.cat([norm(w["embed_tokens.weight"][token]), norm(hidden)])
    value = w["midlayer.self_attn.v_proj.weight"] @ inputs
    x = hidden + w["midlayer.self_attn.o_proj.weight"] @ value
    n = norm(x)
    gate, up = w["midlayer.mlp.gate_proj.weight"] @ n, w["midlayer.mlp.up_proj.weight"] @ n
    x = x + w["midlayer.mlp.down_proj.weight"] @ (torch.nn.functional.silu(gate) * up)
    return torch.softmax(w["lm_head.weight"] @ norm(x), -1), x

worst = 0.0
for first in range(64):
    feature = torch.zeros(3 * 128); feature[first] = 1.0
    hidden = w["fc.weight"] @ feature
    for token in (answers.next_token(first), 7, 55):
        probabilities, hidden = step(token, hidden)
        for other, expected in answers.draft_distribution(token):
            worst = max(worst, abs(probabilities[other].item() / expected - 1))
print(worst)
assert worst < 1e-4, worst
"""
    subprocess.run([sglang_python(), "-c", script, str(tmp_path)], check=True)
