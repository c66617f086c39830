"""Every query of every panel on a real Prometheus that scraped real exporters."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest

from deploy.prometheus import build as rules
from eagle_exporter import catalogue
from grafana import build, client
from tests.dashboards import lint, promql_text
from tests.dashboards.conftest import CONTEXTS, ROWS, SPECULATING_BASELINE, STEP, Stack
from tests.dashboards.replay import KERNELS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from eagle_exporter.registry.reader import RankSnapshot

Document = dict[str, Any]
DOCUMENTS = {name: client.load(build.OUTPUT / name) for name in build.DASHBOARDS}
NODE_A, NODE_B = "node-a:30000", "node-b:30000"


def live(stack: Stack, *servers: str, **chosen: list[str]) -> client.Session:
    """A session over the live traffic, with a window that holds all of it."""
    more = {"server": list(servers)} if servers else {}
    window = stack.end - stack.start + 1.5
    chosen = {"job": ["eagle-exporter"], **more, **chosen}
    return client.Session(stack.url, stack.end - 3, stack.end, 1, window, chosen, math.ceil(window))


def past(stack: Stack, server: str, first: int = 0, last: int = 79) -> client.Session:
    """A session over some scrapes of the past."""
    start, end = stack.history_start + first * STEP, stack.history_start + last * STEP
    return client.Session(stack.url, start, end, STEP, 4 * STEP, {"job": ["past"], "server": [server]})


def all_panels() -> Iterator[tuple[Document, Document]]:
    for document in DOCUMENTS.values():
        for panel in client.panels(document):
            yield document, panel


def find(dashboard: str, title: str) -> tuple[Document, Document]:
    document = DOCUMENTS[dashboard]
    return document, next(panel for panel in client.panels(document) if panel["title"] == title)


def results(session: client.Session, dashboard: str, title: str) -> dict[str, list[client.Series]]:
    document, panel = find(dashboard, title)
    return {target["refId"]: session.run(document, target) for target in panel["targets"]}


def rows(session: client.Session, dashboard: str, title: str) -> list[dict[str, Any]]:
    _, panel = find(dashboard, title)
    return client.table(panel, results(session, dashboard, title))


def value(session: client.Session, dashboard: str, title: str, ref_id: str = "A") -> float:
    (series,) = results(session, dashboard, title)[ref_id]
    return series.value


def named(session: client.Session, dashboard: str, title: str) -> dict[str, float]:
    """Last value of every series of a panel by its legend."""
    document, panel = find(dashboard, title)
    return {
        client.legend(target, series.labels): series.value
        for target in panel["targets"]
        for series in session.run(document, target)
    }


# --- all of them --------------------------------------------------------------------------------------------

NEEDS_MEDIANS = {("Verify share against its baseline", "B"), ("Verify share against its baseline", "C")}
"""The band needs three hours of recorded rules; `test_the_band_follows_the_drift` has them."""

NO_ALERT_FIRES = {("Firing alerts", "A")}
"""`test_a_dead_rank` has one."""

EMPTY_WITHOUT_REPLICAS = {("Tokens per cycle with k steps", ref_id) for ref_id in "DEFGH"} | {
    ("Hooks that are down", "A")
}
"""The first server runs three steps and has all its hooks."""


@pytest.mark.parametrize(
    ("servers", "empty"),
    [
        ((NODE_A,), NEEDS_MEDIANS | NO_ALERT_FIRES | EMPTY_WITHOUT_REPLICAS),
        ((), NEEDS_MEDIANS | NO_ALERT_FIRES),
    ],
    ids=["one instance with eight ranks", "two instances"],
)
def test_every_query_returns_data(stack: Stack, servers: Sequence[str], empty: set[tuple[str, str]]) -> None:
    session = live(stack, *servers)
    without = set()
    for document, panel in all_panels():
        for target in panel["targets"]:
            answer = session.run(document, target)
            if not answer:
                without.add((panel["title"], target["refId"]))
            for series in answer:
                assert all(math.isfinite(number) for _, number in series.points), (panel["title"], series)
    assert without == empty


def test_shares_are_within_0_and_1(stack: Stack) -> None:
    session = live(stack)
    beyond = {"Host against group", "Against group", "Last step: brings over must bring"}
    checked = 0
    for document, panel in all_panels():
        units = {p["value"] for o in panel["fieldConfig"]["overrides"] for p in o["properties"] if p["id"] == "unit"}
        if panel["type"] == "table" and "percentunit" in units:
            table = client.table(panel, {t["refId"]: session.run(document, t) for t in panel["targets"]})
            columns = {
                override["matcher"]["options"]
                for override in panel["fieldConfig"]["overrides"]
                if {"id": "unit", "value": "percentunit"} in override["properties"]
            } - beyond
            if not columns:
                continue
            found = [row[column] for row in table for column in columns if column in row]
        elif panel["fieldConfig"]["defaults"]["unit"] == "percentunit" and panel["title"] not in beyond:
            answers = [series for target in panel["targets"] for series in session.run(document, target)]
            found = [number for series in answers for _, number in series.points]
        else:
            continue
        assert found, panel["title"]
        assert all(0 <= number <= 1 + 1e-9 for number in found), (panel["title"], found)
        checked += len(found)
    assert checked > 50


def test_names_exist_in_a_rendered_scrape(stack: Stack) -> None:
    """What the queries ask for is what the exporter shows, name by name and label by label."""
    exposed: dict[str, set[str]] = {}
    for line in stack.scrape.splitlines():
        if line.startswith("eagle_"):
            name, _, rest = line.partition("{")
            labels = {part.split("=")[0] for part in rest.rsplit("}", 1)[0].split('",') if "=" in part}
            exposed.setdefault(name.split(" ")[0], set()).update(labels)
    asked: set[str] = set()
    for document in DOCUMENTS.values():
        for where, expression in lint.all_expressions(document):
            for selector in promql_text.selectors(expression):
                if selector.metric.startswith("eagle_"):
                    asked.add(selector.metric)
                    assert selector.metric in exposed, where
                    # An empty dp_rank is no label in Prometheus, but the exporter writes it.
                    missing = set(selector.matchers) - exposed[selector.metric] - lint.TARGET_LABELS
                    assert not missing, (where, selector.metric)
    assert len(asked) > 40
    assert lint.unknown_names(DOCUMENTS["eagle-cycle.json"]) == []


def test_no_query_is_slow(stack: Stack) -> None:
    """On ten ranks; the what-if tables are the heaviest."""
    import time

    session = live(stack)
    for document, panel in all_panels():
        for target in panel["targets"]:
            begin = time.monotonic()
            session.run(document, target)
            assert time.monotonic() - begin < 10, panel["title"]


def test_variables_offer_what_there_is(stack: Stack) -> None:
    document = DOCUMENTS["eagle-cycle.json"]
    session = live(stack)
    options = {
        name: session.label_values(document, name) for name in client.variables(document) if name != "datasource"
    }
    assert set(options["job"]) >= {"eagle-exporter", "past"}
    assert len(options["instance"]) == 2
    assert options["node"] == ["node-a", "node-b"]
    assert options["server"] == [NODE_A, NODE_B]
    assert options["dp_rank"] == ["0", "1"]
    assert options["tp_rank"] == [str(rank) for rank in range(8)]
    assert options["hardware"] == ["gpu-node-a"]
    assert live(stack, node=["node-b"]).label_values(document, "server") == [NODE_B]
    both = client.Session(stack.url, stack.history_start, stack.end, 60, 60)
    assert set(both.label_values(document, "engine_type")) == {"unified", "decode"}


def test_disaggregated_servers_are_separable(stack: Stack) -> None:
    for engine_type, expected in (("decode", {"changed"}), ("unified", {"quiet", "dead", "reset", "adaptive"})):
        chosen = {"job": ["past"], "engine_type": [engine_type]}
        session = client.Session(stack.url, stack.history_end - 60, stack.history_end, STEP, 60, chosen)
        assert {row["Server"] for row in rows(session, "eagle-fleet.json", "Servers")} == expected


def test_a_choice_narrows_every_panel(stack: Stack) -> None:
    """No panel ignores the chosen server: with one that does not exist only the count of alerts is left."""
    session = live(stack, "nowhere:1")
    left = {
        panel["title"]
        for document, panel in all_panels()
        if any(session.run(document, target) for target in panel["targets"])
    }
    about_exporters = {"Exporters down", "Scrape duration", "Exporters"}
    assert left == {"Alerts firing"} | about_exporters


@pytest.mark.parametrize(("variable", "chosen"), [("instance", "127.0.0.1:1"), ("node", "x"), ("job", "other")])
def test_a_choice_of_targets_narrows_exporters_too(stack: Stack, variable: str, chosen: str) -> None:
    session = live(stack, **{variable: [chosen]})
    left = {
        panel["title"]
        for document, panel in all_panels()
        if any(session.run(document, target) for target in panel["targets"])
    }
    assert left == {"Alerts firing"}


# --- against the registry -----------------------------------------------------------------------------------


def total(ranks: Sequence[RankSnapshot], name: str, *, recording: bool = True, **labels: Any) -> float:
    """Sum a family straight from the registry files; all counters began at 0."""
    result = 0.0
    for rank in ranks:
        family = rank.family(name)
        if family is None or (recording and rank.family("eagle_drafts_total") is None):
            continue
        for series in family.series:
            own = dict(zip(family.labels, series.labels, strict=True))
            if all(own[label] == wanted for label, wanted in labels.items()):
                result += series.value
    return result


def exactly(number: float | list[float] | dict[str, float]) -> Any:
    return pytest.approx(number, rel=1e-6)


def _figures(ranks: Sequence[RankSnapshot]) -> dict[tuple[str, str], float]:
    def sum_of(name: str, **labels: Any) -> float:
        return total(ranks, name, **labels)

    cycle, timed = sum_of("eagle_batch_phase_seconds_total"), sum_of("eagle_batch_timed_cycles_total")
    verify = sum_of("eagle_batch_phase_seconds_total", phase="target_verify")
    drafts, accepted = sum_of("eagle_drafts_total"), sum_of("eagle_accepted_tokens_total")
    offered, wasted = sum_of("eagle_draft_tokens_total"), sum_of("eagle_wasted_rows_total")
    used = (accepted + drafts) / (offered + drafts) * drafts / (drafts + wasted)
    return {
        ("eagle-cycle.json", "Verify share"): verify / cycle,
        ("eagle-cycle.json", "Cycle"): cycle / timed,
        ("eagle-cycle.json", "Accept length"): 1 + accepted / drafts,
        ("eagle-cycle.json", "Host-bound cycles"): sum_of("eagle_host_bound_cycles_total") / timed,
        ("eagle-cycle.json", "Gap between cycles"): sum_of("eagle_batch_gap_seconds_total") / timed,
        ("eagle-cycle.json", "Batch size"): sum_of("eagle_batch_drafts_total") / sum_of("eagle_batch_cycles_total"),
        ("eagle-acceptance.json", "Acceptance rate"): accepted / offered,
        ("eagle-acceptance.json", "Verified in vain"): 1 - used,
        ("eagle-acceptance.json", "What verify works on"): used,
    }


@pytest.mark.parametrize("server", [NODE_A, NODE_B])
def test_numbers_are_those_of_the_registry(stack: Stack, server: str) -> None:
    session = live(stack, server)
    ranks = stack.node_a if server == NODE_A else stack.node_b
    for (dashboard, title), expected in _figures(ranks).items():
        assert value(session, dashboard, title) == exactly(expected), title


def test_two_servers_pool_as_a_ratio_of_sums(stack: Stack) -> None:
    """Not as a mean of two ratios, which is far away for some. Scrapes of two targets are a moment apart."""
    pooled = _figures([*stack.node_a, *stack.node_b])
    first, second = _figures(stack.node_a), _figures(stack.node_b)
    far = 0
    for (dashboard, title), expected in pooled.items():
        if title in ("Host-bound cycles", "Batch size"):  # by server
            continue
        found = value(live(stack), dashboard, title)
        assert found == pytest.approx(expected, rel=0.04), title
        mean_of_ratios = (first[dashboard, title] + second[dashboard, title]) / 2
        far += abs(mean_of_ratios / expected - 1) > 0.08
    assert far


@pytest.mark.parametrize("server", [NODE_A, NODE_B])
def test_phases(stack: Stack, server: str) -> None:
    session, ranks = live(stack, server), stack.node_a if server == NODE_A else stack.node_b
    timed, cycle = (
        total(ranks, "eagle_batch_timed_cycles_total"),
        total(ranks, "eagle_batch_phase_seconds_total"),
    )
    milliseconds = named(session, "eagle-cycle.json", "Cycle by phase")
    (now,) = rows(session, "eagle-cycle.json", "The cycle now")
    host = {row["phase"]: row for row in rows(session, "eagle-cycle.json", "Device and host time by phase")}
    for phase in catalogue.PHASES:
        device = total(ranks, "eagle_batch_phase_seconds_total", phase=phase)
        assert milliseconds[phase] == exactly(device / timed)
        assert now[phase] == exactly(device / cycle)
        assert host[phase]["device"] == exactly(device / timed)
        assert host[phase]["host"] == exactly(total(ranks, "eagle_phase_host_seconds_total", phase=phase) / timed)
    assert sum(now[phase] for phase in catalogue.PHASES) == exactly(1)
    assert sum(milliseconds.values()) == exactly(cycle / timed)


def test_quantiles_lie_in_the_bucket_of_the_recorded_cycles(stack: Stack) -> None:
    lines = named(live(stack, NODE_A), "eagle-cycle.json", "Cycle time")
    leader = next(rank for rank in stack.node_a if rank.labels["tp_rank"] == "0")
    family = leader.family("eagle_cycle_duration_seconds")
    assert family is not None
    (series,) = family.series
    count = sum(series.buckets)
    for quantile, legend in ((0.5, "p50"), (0.9, "p90"), (0.99, "p99")):
        seen, index = 0, -1
        while seen < quantile * count:
            index += 1
            seen += series.buckets[index]
        assert family.bounds[index - 1] <= lines[legend] <= family.bounds[index]
    assert lines["mean"] == exactly(series.value / count)


def test_heatmaps_hold_every_observation(stack: Stack) -> None:
    session = live(stack, NODE_A)
    for dashboard, title, name, labels in (
        ("eagle-cycle.json", "Target verify", "eagle_phase_duration_seconds", {"phase": "target_verify"}),
        ("eagle-acceptance.json", "Accept length distribution", "eagle_accept_length_tokens", {}),
    ):
        cells = {series.labels["le"]: series.value for series in results(session, dashboard, title)["A"]}
        leader = next(rank for rank in stack.node_a if rank.labels["tp_rank"] == "0")
        family = leader.family(name)
        assert family is not None
        (series,) = [one for one in family.series if one.labels == tuple(labels.values())]
        for le, cumulative in cells.items():
            bound = math.inf if le == "+Inf" else float(le)
            expected = sum(
                n for n, limit in zip(series.buckets, (*family.bounds, math.inf), strict=True) if limit <= bound
            )
            # increase() extrapolates to the edges of the window: the same factor for every bucket.
            assert cumulative / cells["+Inf"] == exactly(expected / sum(series.buckets)), (title, le)
        assert len(cells) > 3


def test_servers_with_different_buckets_pool_over_the_common_ones(stack: Stack) -> None:
    """Three and eight steps: a bound that only one server has would make the cumulative counts fall."""
    cells = {
        s.labels["le"]: s.value
        for s in results(live(stack), "eagle-acceptance.json", "Accept length distribution")["A"]
    }
    assert set(cells) == {"1.0", "2.0", "3.0", "4.0", "+Inf"}
    values = [cells[le] for le in ("1.0", "2.0", "3.0", "4.0", "+Inf")]
    assert values == sorted(values)
    alone = results(live(stack, NODE_B), "eagle-acceptance.json", "Accept length distribution")["A"]
    assert len(alone) == 10


def test_acceptance_by_position_context_and_batch_size(stack: Stack) -> None:
    session = live(stack, NODE_B)
    positions = named(session, "eagle-acceptance.json", "Acceptance by position")
    assert len(positions) == 8
    for position in range(8):
        accepted = total(stack.node_b, "eagle_accepted_tokens_per_pos_total", position=str(position))
        offered = total(stack.node_b, "eagle_offered_tokens_per_pos_total", position=str(position))
        assert positions[f"position {position}"] == exactly(accepted / offered)
    contexts = named(session, "eagle-acceptance.json", "By context length")
    traffic = named(session, "eagle-acceptance.json", "Traffic by context length")
    assert list(contexts) == list(traffic) == list(catalogue.CONTEXT_LENGTHS)
    everything = total(stack.node_b, "eagle_context_drafts_total")
    for context in catalogue.CONTEXT_LENGTHS:
        drafts = total(stack.node_b, "eagle_context_drafts_total", context_length=context)
        accepted = total(stack.node_b, "eagle_context_accepted_tokens_total", context_length=context)
        assert contexts[context] == exactly(1 + accepted / drafts)
        assert traffic[context] == exactly(drafts / everything)
    sizes = named(session, "eagle-acceptance.json", "By batch size")
    assert list(sizes) == list(catalogue.BATCH_SIZES)
    for size in catalogue.BATCH_SIZES:
        drafts = total(stack.node_b, "eagle_batch_drafts_total", batch_size=size)
        accepted = total(stack.node_b, "eagle_batch_accepted_tokens_total", batch_size=size)
        assert sizes[size] == exactly(1 + accepted / drafts)
    replicas = named(session, "eagle-acceptance.json", "By replica")
    for rank in stack.node_b:
        legend = f"{NODE_B} {rank.labels['dp_rank']}"
        expected = 1 + total([rank], "eagle_accepted_tokens_total") / total([rank], "eagle_drafts_total")
        assert replicas[legend] == exactly(expected)
    assert len(set(replicas.values())) == 2


def test_positions_are_tokens_per_cycle(stack: Stack) -> None:
    """L(k) over all steps is the accept length of the drafts that speculated."""
    bars = named(live(stack, NODE_A), "eagle-payoff.json", "Tokens per cycle with k steps")
    assert list(bars) == [f"{k} · {NODE_A}" for k in (1, 2, 3)]
    values = list(bars.values())
    assert values == sorted(values)
    expected = 1 + total(stack.node_a, "eagle_accepted_tokens_total") / total(stack.node_a, "eagle_drafts_total")
    assert values[-1] == exactly(expected)


def _cell(ranks: Sequence[RankSnapshot], size: str, steps: str) -> dict[str, float]:
    def sum_of(name: str, **labels: Any) -> float:
        return total(ranks, name, batch_size=size, num_steps=steps, **labels)

    timed = sum_of("eagle_batch_timed_cycles_total")
    gap = sum_of("eagle_batch_gap_seconds_total")
    return {
        "cost": (sum_of("eagle_batch_phase_seconds_total") + gap) / timed,
        "plain": (
            sum_of("eagle_batch_phase_seconds_total")
            - sum_of("eagle_batch_phase_seconds_total", phase="draft_extend")
            + gap
        )
        / timed,
        "verify": sum_of("eagle_batch_phase_seconds_total", phase="target_verify") / timed,
        "extend": sum_of("eagle_batch_phase_seconds_total", phase="draft_extend") / timed,
        "draft": sum_of("eagle_batch_phase_seconds_total", phase="draft_steps") / timed,
        "length": 1 + sum_of("eagle_batch_accepted_tokens_total") / sum_of("eagle_batch_drafts_total"),
        "cycles": sum_of("eagle_batch_cycles_total"),
        "requests": sum_of("eagle_batch_drafts_total") / sum_of("eagle_batch_cycles_total"),
    }


def test_speedup_with_a_configured_and_a_measured_baseline(stack: Stack) -> None:
    for server, ranks, steps in ((NODE_A, stack.node_a, "3"), (NODE_B, stack.node_b, "8")):
        table = {
            row["Batch size"]: row
            for row in rows(live(stack, server), "eagle-payoff.json", "By batch size and step count")
        }
        assert set(table) == set(catalogue.BATCH_SIZES)
        spent = saved = 0.0
        for size in catalogue.BATCH_SIZES:
            cell, row = _cell(ranks, size, steps), table[size]
            plain = SPECULATING_BASELINE[size] if server == NODE_A else _cell(ranks, size, "0")["plain"]
            assert row["Steps"] == steps
            assert row["Cycle + gap"] == exactly(cell["cost"])
            assert row["Without speculation"] == exactly(plain)
            assert row["Accept length"] == exactly(cell["length"])
            assert row["Break-even length"] == exactly(cell["cost"] / plain)
            assert row["Speed-up"] == exactly(cell["length"] * plain / cell["cost"])
            assert row["tok/s while decoding"] == exactly(cell["requests"] * cell["length"] / cell["cost"])
            # Speculation pays exactly where the accept length is above break-even.
            assert (row["Speed-up"] > 1) == (row["Accept length"] > row["Break-even length"])
            spent += cell["cycles"] * cell["cost"]
            saved += cell["cycles"] * cell["length"] * plain
        assert value(live(stack, server), "eagle-payoff.json", "Speed-up") == exactly(saved / spent)


def test_fewer_steps(stack: Stack) -> None:
    positions = [
        total(stack.node_b, "eagle_accepted_tokens_per_pos_total", position=str(i))
        / total(stack.node_b, "eagle_offered_tokens_per_pos_total", position=str(i))
        for i in range(8)
    ]
    for size in ("1", "9-16", "129+"):
        session = live(stack, NODE_B, batch_size=[size])
        table = rows(session, "eagle-payoff.json", "tok/s with fewer steps")
        found = {row["Steps"]: row for row in table}
        assert len(found) == len(table) == 7
        now, plain = _cell(stack.node_b, size, "8"), _cell(stack.node_b, size, "0")
        running = found["8"]
        assert running["Batch size"] == size
        measured = now["requests"] * now["length"] / now["cost"]
        assert running["tok/s (estimate)"] == running["at least"] == running["at most"] == exactly(measured)
        for k in (1, 2, 3, 4, 5, 7):
            row = found[str(k)]
            length = 1 + (now["length"] - 1) * sum(positions[:k]) / sum(positions)
            fixed = now["cost"] - now["draft"] * (1 - (k - 1) / 7)
            slope = now["verify"] - plain["verify"]
            shorter = now["extend"] * (1 - (k + 1) / 9)
            assert row["tok/s (estimate)"] == exactly(now["requests"] * length / (fixed - slope * (1 - k / 8)))
            assert row["at least"] == exactly(now["requests"] * length / fixed)
            assert row["at most"] == exactly(now["requests"] * length / (fixed - slope - shorter))
            assert row["at least"] <= row["tok/s (estimate)"] <= row["at most"]
        (best,) = results(session, "eagle-payoff.json", "Best step count, tok/s (estimate)")["A"]
        top = max(table, key=lambda row: row["tok/s (estimate)"])
        assert (best.labels["steps"], best.value) == (top["Steps"], exactly(top["tok/s (estimate)"]))
    # Nothing chosen: the busiest one.
    table = rows(live(stack, NODE_B), "eagle-payoff.json", "tok/s with fewer steps")
    busiest = max(catalogue.BATCH_SIZES, key=lambda size: _cell(stack.node_b, size, "8")["cycles"])
    assert {row["Batch size"] for row in table} == {busiest} == {"3-4"}


@pytest.mark.parametrize(("server", "steps"), [(NODE_A, 3), (NODE_B, 8)])
def test_the_last_step(stack: Stack, server: str, steps: int) -> None:
    session, ranks = live(stack, server), stack.node_a if server == NODE_A else stack.node_b
    cost = named(session, "eagle-payoff.json", "What one more step costs")
    lines = named(session, "eagle-payoff.json", "What the last step brings, and what it must bring")
    last: dict[str, Any] = {"position": str(steps - 1)}
    offered = total(ranks, "eagle_offered_tokens_per_pos_total", **last)
    brings = total(ranks, "eagle_accepted_tokens_per_pos_total", **last) / offered
    assert lines[f"brings · {server}"] == pytest.approx(brings)
    most = (0.0, 0.0)
    for size in catalogue.BATCH_SIZES:
        now = _cell(ranks, size, str(steps))
        one_token = SPECULATING_BASELINE[size] if server == NODE_A else _cell(ranks, size, "0")["verify"]
        step = now["draft"] / (steps - 1) + max(0.0, now["verify"] - one_token) / steps
        assert cost[f"batch {size}, {steps} steps · {server}"] == exactly(step)
        must = step * now["length"] / now["cost"]
        assert lines[f"must bring, batch {size} · {server}"] == exactly(must)
        most = max(most, (now["cycles"], must))
    worth = value(session, "eagle-payoff.json", "Last step: brings over must bring")
    assert worth == pytest.approx(brings / most[1], rel=1e-6)


def test_rank_table(stack: Stack) -> None:
    table = {row["TP"]: row for row in rows(live(stack, NODE_A), "eagle-cycle.json", "Ranks")}
    assert set(table) == {str(rank) for rank in range(8)}
    hosts = {}
    for rank in stack.node_a:
        row = table[rank.labels["tp_rank"]]
        timed = total([rank], "eagle_batch_timed_cycles_total", recording=False)
        device = total([rank], "eagle_batch_phase_seconds_total", recording=False)
        hosts[rank.labels["tp_rank"]] = total([rank], "eagle_phase_host_seconds_total", recording=False) / timed
        assert row["Up"] == 1
        assert row["Cycle (device)"] == exactly(device / timed)
        assert row["Cycle (host)"] == exactly(hosts[rank.labels["tp_rank"]])
        assert row["Gap"] == exactly(total([rank], "eagle_batch_gap_seconds_total", recording=False) / timed)
        bound = total([rank], "eagle_host_bound_cycles_total", recording=False)
        assert row["Host-bound"] == exactly(bound / timed)
        assert 0 <= row["Last cycle"] < 60
    # The slow host stands out; its device time does not.
    slow = table["5"]
    assert slow["Host against group"] == exactly(2.0)
    assert [row["Host against group"] for tp, row in table.items() if tp != "5"] == exactly([1.0] * 7)
    assert slow["Cycle (device)"] == exactly(table["0"]["Cycle (device)"])


def test_a_chosen_rank(stack: Stack) -> None:
    session = live(stack, NODE_A, tp_rank=["3"])
    assert [row["TP"] for row in rows(session, "eagle-cycle.json", "Ranks")] == ["3"]
    assert value(session, "eagle-cycle.json", "Accept length") > 1


def test_rates_by_the_wall_clock(stack: Stack) -> None:
    tokens = total(stack.node_a, "eagle_output_tokens_total")
    window = stack.end - stack.start + 1.5
    found = value(live(stack, NODE_A), "eagle-cycle.json", "Output tok/s")
    # rate() knows the time to within a scrape interval at each end.
    assert tokens / (window + 2) < found < tokens / (window - 3)


def test_eight_ranks_count_once(stack: Stack) -> None:
    leader = [rank for rank in stack.node_a if rank.labels["tp_rank"] == "0"]
    assert value(live(stack, NODE_A), "eagle-cycle.json", "Running requests") == leader[0].value(
        "eagle_running_requests"
    )
    assert value(live(stack), "eagle-cycle.json", "Running requests") == sum(
        rank.value("eagle_running_requests") or 0 for rank in (*leader, *stack.node_b)
    )


def test_fleet(stack: Stack) -> None:
    table = {row["Server"]: row for row in rows(live(stack), "eagle-fleet.json", "Servers")}
    assert set(table) == {NODE_A, NODE_B}
    for server, ranks in ((NODE_A, stack.node_a), (NODE_B, stack.node_b)):
        row = table[server]
        assert row["Verify share"] == exactly(_figures(ranks)["eagle-cycle.json", "Verify share"])
        assert row["Accept length"] == exactly(_figures(ranks)["eagle-cycle.json", "Accept length"])
        assert (row["Alerts"], row["Ranks down"], row["Model"], row["Engine"]) == (
            0,
            0,
            "kimi-k2.5",
            "unified",
        )
        assert row["Speed-up"] == exactly(value(live(stack, server), "eagle-payoff.json", "Speed-up"))
        assert row["Cycle p99"] > 0.005
    assert (table[NODE_A]["Config"], table[NODE_B]["Config"]) == ("1a2b3c4d", "2b3c4d5e")
    assert list(rows(live(stack), "eagle-fleet.json", "Servers")[0])[:3] == ["Server", "Alerts", "Ranks down"]


def test_exporter_health(stack: Stack) -> None:
    session = live(stack)
    assert value(session, "eagle-fleet.json", "Exporters down") == 0
    assert value(session, "eagle-fleet.json", "Servers up") == 2
    assert [
        (row["Server"], row["Hook"], row["Ranks"]) for row in rows(session, "eagle-fleet.json", "Hooks that are down")
    ] == [(NODE_B, "kv_allocation", 2)]
    assert {
        (row["Server"], row["State"], row["Ranks"]) for row in rows(session, "eagle-fleet.json", "State of the timing")
    } == {
        (NODE_A, "on", 8),
        (NODE_B, "on", 2),
    }
    exporters = rows(session, "eagle-fleet.json", "Exporters")
    assert [(row["Files skipped"], row["Last read worked"]) for row in exporters] == [(0, 1), (0, 1)]
    cost = named(live(stack, NODE_A), "eagle-fleet.json", "Cost of the hooks")[NODE_A]
    assert cost == exactly(12e-6)


def test_configuration_tables(stack: Stack) -> None:
    session = live(stack, NODE_A)
    (config,) = rows(session, "eagle-cycle.json", "Speculative decoding")
    assert (config["Config"], config["Steps"], config["topk"], config["TP"], config["Ranks"]) == (
        "1a2b3c4d",
        "3",
        "1",
        "8",
        8,
    )
    (nccl,) = rows(session, "eagle-cycle.json", "NCCL")
    assert (nccl["NCCL"], nccl["NCCL_PROTO"], nccl["NCCL_ALGO"], nccl["NCCL_P2P_LEVEL"]) == (
        "2.27.5",
        "LL",
        "Ring",
        "SYS",
    )


def test_hardware_joins_by_uuid(stack: Stack) -> None:
    clocks = named(live(stack, NODE_A), "eagle-cycle.json", "SM clock")
    assert clocks == {f"TP {tp} · {NODE_A}": (1680e6 if tp == 5 else 1980e6) for tp in range(8)}
    chosen = named(live(stack, NODE_A, tp_rank=["5"]), "eagle-cycle.json", "GPU busy")
    assert chosen == {f"TP 5 · {NODE_A}": exactly(0.97)}
    assert named(live(stack, NODE_B), "eagle-cycle.json", "SM clock") == {}


# --- kernels of captured cycles -----------------------------------------------------------------------------


def per_cycle(ranks: Sequence[RankSnapshot], name: str, **labels: Any) -> float:
    """Seconds per captured cycle, straight from the registry files."""
    found = [rank for rank in ranks if total([rank], "eagle_kernel_profiled_cycles_total", recording=False) > 0]
    cycles = total(found, "eagle_kernel_profiled_cycles_total", recording=False)
    return total(found, name, recording=False, **labels) / cycles


def kernel_seconds(classes: dict[str, float], nccl: float) -> dict[str, float]:
    """Seconds of the replayed kernels with a part of NCCL's all-reduce."""
    seconds = {name: milliseconds / 1e3 for name, milliseconds in classes.items()}
    return {**seconds, **({"allreduce_nccl": sum(seconds.values()) / (1 - nccl) * nccl} if nccl else {})}


def test_kernel_classes_and_idle_time_of_every_phase(stack: Stack) -> None:
    """One of the replicas was captured, and the other has no part in it."""
    session, ranks = live(stack, NODE_B), stack.node_b
    table = rows(session, "eagle-cycle.json", "Kernel classes")
    found = {(row["Phase"], row["Kernel class"]): row for row in table}
    for phase, classes in KERNELS.items():
        whole = per_cycle(ranks, "eagle_kernel_phase_seconds_total", phase=phase)
        seconds = {kernel_class: found[phase, kernel_class]["Per cycle"] for kernel_class in (*classes, "idle")}
        assert sum(seconds.values()) == exactly(whole)
        assert sum(found[phase, name]["Share of the phase"] for name in seconds) == exactly(1)
        for kernel_class, milliseconds in classes.items():
            assert seconds[kernel_class] == exactly(milliseconds / 1e3)
            assert found[phase, kernel_class]["Share of the phase"] == exactly(milliseconds / 1e3 / whole)
        busy = per_cycle(ranks, "eagle_kernel_busy_seconds_total", phase=phase)
        assert seconds["idle"] == exactly(whole - busy)
    assert len(found) == sum(len(classes) + 1 for classes in KERNELS.values())
    bars = rows(session, "eagle-cycle.json", "Phases by kernel class")
    assert {bar["phase\\kernel_class"]: len(bar) - 2 for bar in bars} == {
        phase: len(classes) for phase, classes in KERNELS.items()
    }
    assert bars[0]["phase\\kernel_class"] == "target_verify"
    assert value(session, "eagle-cycle.json", "Captured cycles") == 4
    assert results(session, "eagle-cycle.json", "All-reduce in verify") == {"A": []}
    captures = named(session, "eagle-cycle.json", "Captures")
    assert captures["completed"] == 1
    assert captures["busy"] == pytest.approx(1, rel=0.45)  # increase() extrapolates to the edges of the window


def test_the_rank_that_the_others_wait_for_has_the_least_all_reduce(stack: Stack) -> None:
    """On seven of the eight ranks the series began with the only capture."""
    session = live(stack, NODE_A)
    table = {row["TP"]: row for row in rows(session, "eagle-cycle.json", "Verify by rank")}
    assert set(table) == {str(rank) for rank in range(8)}
    verify = {"phase": "target_verify"}
    for rank in stack.node_a:
        row = table[rank.labels["tp_rank"]]
        allreduce = per_cycle([rank], "eagle_kernel_seconds_total", kernel_class="allreduce_nccl", **verify)
        whole = per_cycle([rank], "eagle_kernel_phase_seconds_total", **verify)
        busy = per_cycle([rank], "eagle_kernel_busy_seconds_total", **verify)
        assert row["All-reduce"] == exactly(allreduce)
        assert row["Other kernels"] == exactly(busy - allreduce)
        assert row["Idle"] == exactly(whole - busy)
        assert row["Verify"] == exactly(whole)
        assert row["Captured cycles"] == pytest.approx(10, rel=0.45)
    slow = table["5"]
    assert slow["Against group"] < 0.7
    assert [row["Against group"] for tp, row in table.items() if tp != "5"] == exactly([1.0] * 7)
    (chosen,) = rows(live(stack, NODE_A, tp_rank=["5"]), "eagle-cycle.json", "Verify by rank")
    assert chosen["All-reduce"] == exactly(slow["All-reduce"])
    share = value(live(stack, NODE_A, tp_rank=["3"]), "eagle-cycle.json", "All-reduce in verify")
    assert share == exactly(table["3"]["All-reduce"] / table["3"]["Verify"])
    assert value(session, "eagle-cycle.json", "Idle in verify") == exactly(1 - 1 / 1.04)


def test_captures_are_those_of_the_time_range(stack: Stack) -> None:
    def classes(first: int, last: int) -> dict[str, float]:
        table = rows(past(stack, "changed", first, last), "eagle-cycle.json", "Kernel classes")
        return {row["Kernel class"]: row["Per cycle"] for row in table if row["Phase"] == "target_verify"}

    before, after = kernel_seconds(KERNELS["target_verify"], 0.0), kernel_seconds(KERNELS["target_verify"], 0.5)
    first, second, both, neither = classes(10, 30), classes(50, 79), classes(10, 79), classes(62, 79)
    assert {name: first[name] for name in before} == exactly(before)
    assert set(first) == {*before, "idle"}
    assert {name: second[name] for name in after} == exactly({name: 3 * seconds for name, seconds in after.items()})
    # The server was restarted between the two: 5 cycles of the first life and 20 of the second.
    pooled = {name: (5 * before.get(name, 0.0) + 20 * 3 * seconds) / 25 for name, seconds in after.items()}
    assert {name: both[name] for name in after} == pytest.approx(pooled, rel=0.02)
    assert neither == {}


def test_a_single_capture_shows_on_every_rank_from_its_first_value_on(stack: Stack) -> None:
    for first, last in ((10, 31), (10, 39), (25, 31)):
        session = past(stack, "dead", first, last)
        table = {row["TP"]: row for row in rows(session, "eagle-cycle.json", "Verify by rank")}
        assert set(table) == {"0", "1"}
        assert table["0"]["All-reduce"] == exactly(table["1"]["All-reduce"])
    assert rows(past(stack, "dead", 0, 29), "eagle-cycle.json", "Verify by rank") == []


def test_how_old_the_last_capture_is(stack: Stack) -> None:
    for last, age in ((31, 1), (39, 9), (36, 6)):
        found = value(past(stack, "dead", 10, last), "eagle-cycle.json", "Last capture")
        assert found == pytest.approx(age * STEP, abs=60)
    assert results(past(stack, "dead", 0, 29), "eagle-cycle.json", "Last capture") == {"A": []}


def test_captures_one_by_one(stack: Stack) -> None:
    document, panel = find("eagle-cycle.json", "Verify by kernel class, capture by capture")
    series = {
        one.labels["kernel_class"]: one.points for one in past(stack, "changed").run(document, panel["targets"][0])
    }
    moments = {round((t - stack.history_start) / STEP): seconds for t, seconds in series["gemm"]}
    assert set(moments) == {20, 21, 22, 23, 60, 61, 62, 63}
    gemm = KERNELS["target_verify"]["gemm"] / 1e3
    assert moments[20] == moments[23] == exactly(gemm)
    assert moments[60] == moments[63] == exactly(3 * gemm)
    assert {round((t - stack.history_start) / STEP) for t, _ in series["allreduce_nccl"]} == {60, 61, 62, 63}


@pytest.mark.parametrize("server", ["quiet", "adaptive"])
def test_without_a_capture_every_kernel_panel_says_so(stack: Stack, server: str) -> None:
    document = DOCUMENTS["eagle-cycle.json"]
    (row,) = [panel for panel in document["panels"] if panel["title"].startswith("Inside verify")]
    for panel in row["panels"]:
        for target in panel["targets"]:
            assert past(stack, server).run(document, target) == [], panel["title"]


# --- what went wrong, and what never was --------------------------------------------------------------------


def test_a_quiet_server_shows_no_traffic(stack: Stack) -> None:
    session = past(stack, "quiet", 20, 79)
    empty: set[str] = set()
    shown: set[str] = set()
    for document, panel in all_panels():
        for target in panel["targets"]:
            answer = session.run(document, target)
            numbers = [number for series in answer for _, number in series.points]
            assert all(math.isfinite(number) for number in numbers), panel["title"]
            if panel["type"] == "heatmap":
                # Grafana draws no cell for these (filterValues).
                assert set(numbers) == {0.0}
                assert panel["options"]["filterValues"]["le"] > 0
            elif panel["fieldConfig"]["defaults"]["noValue"] in ("No traffic", build.NO_BASELINE):
                (shown if any(numbers) else empty).add(panel["title"])
    assert shown == set()
    assert {
        "Verify share",
        "Cycle by phase",
        "Cycle time",
        "Accept length",
        "Speed-up",
        "tok/s with fewer steps",
    } <= empty
    (row,) = rows(session, "eagle-fleet.json", "Servers")
    assert "Verify share" not in row
    assert (row["Ranks down"], row["Running"]) == (0, 0)
    (rank,) = rows(session, "eagle-cycle.json", "Ranks")
    assert rank["Up"] == 1
    assert "Cycle (device)" not in rank


def test_a_dead_rank(stack: Stack) -> None:
    before, after, long_after = (
        past(stack, "dead", 0, 30),
        past(stack, "dead", 40, 46),
        past(stack, "dead", 40, 79),
    )
    assert value(before, "eagle-cycle.json", "Ranks down") == 0
    for session in (after, long_after):
        assert value(session, "eagle-cycle.json", "Ranks down") == 1
        table = {row["TP"]: row for row in rows(session, "eagle-cycle.json", "Ranks")}
        assert (table["0"]["Up"], table["1"]["Up"]) == (1, 0)
        assert table["0"]["Cycle (device)"] > 0.005
        # No figure of now for a rank that is gone.
        assert "Cycle (device)" not in table["1"] or session is after
        (server,) = rows(session, "eagle-fleet.json", "Servers")
        assert server["Ranks down"] == 1
        assert 0.8 < value(session, "eagle-cycle.json", "Verify share") < 1
    assert value(long_after, "eagle-cycle.json", "Alerts firing") == 1
    assert rows(long_after, "eagle-fleet.json", "Servers")[0]["Alerts"] == 1
    (alert,) = rows(long_after, "eagle-fleet.json", "Firing alerts")
    assert (alert["Severity"], alert["Alert"], alert["Server"]) == ("critical", "EagleRankGone", "dead")


def test_a_restart_resets_counters_and_nothing_jumps(stack: Stack) -> None:
    document, panel = find("eagle-cycle.json", "Output")
    (series,) = past(stack, "reset", 8, 79).run(document, panel["targets"][0])
    rates = [number for _, number in series.points]
    assert len(rates) == 72
    usual = sorted(rates)[len(rates) // 2]
    assert usual == pytest.approx(30 * 2.24 / STEP, rel=0.1)
    assert all(0 < rate < 1.35 * usual for rate in rates)
    for title in ("Accept length over time", "Cycle by phase", "Verify share against its baseline"):
        document, panel = find("eagle-cycle.json", title)
        (series,) = past(stack, "reset", 8, 79).run(document, panel["targets"][0])
        numbers = [number for _, number in series.points]
        assert len(numbers) == 72
        assert max(numbers) < 1.3 * min(numbers), title


def test_adaptive_steps(stack: Stack) -> None:
    session = past(stack, "adaptive", 0, 79)
    (steps,) = results(session, "eagle-acceptance.json", "Step count in force")["A"]
    assert [number for _, number in steps.points] == [float(index // 10 % 4) for index in range(80)]
    document, panel = find("eagle-acceptance.json", "Acceptance by position")
    positions = {s.labels["position"]: s.points for s in session.run(document, panel["targets"][0])}
    times = {
        position: {round((t - stack.history_start) / STEP) for t, _ in points} for position, points in positions.items()
    }
    # A position exists while it is offered: it is not shown as rejected when the controller steps down.
    assert set(range(35, 40)) <= times["2"]
    assert not set(range(15, 20)) & times["2"]
    assert set(range(15, 20)) <= times["0"]
    assert all(0 < number <= 1 for points in positions.values() for _, number in points)
    for index in (5, 15, 25, 35):
        (now,) = rows(past(stack, "adaptive", 0, index), "eagle-cycle.json", "The cycle now")
        assert sum(now[phase] for phase in catalogue.PHASES) == exactly(1)
    # Costs of different step counts are never pooled into one cell.
    table = rows(past(stack, "adaptive", 0, 22), "eagle-payoff.json", "By batch size and step count")
    assert {row["Steps"] for row in table} == {"1", "2"}
    # Between 0 and 1 steps the baseline is measured beside the speculation, and it is judged by it.
    (cell,) = rows(past(stack, "adaptive", 0, 12), "eagle-payoff.json", "By batch size and step count")
    assert cell["Speed-up"] == exactly(cell["Accept length"] / cell["Break-even length"])
    # Long after it there is none, and no speed-up is invented.
    assert results(past(stack, "adaptive", 0, 30), "eagle-payoff.json", "Speed-up") == {"A": []}


def _moments(stack: Stack, session: client.Session, name: str) -> dict[str, list[int]]:
    document = DOCUMENTS["eagle-cycle.json"]
    (annotation,) = [one for one in document["annotations"]["list"] if one["name"] == name]
    found: dict[str, list[int]] = {}
    for series in session.over_range(session.interpolate(document, annotation["expr"])):
        legend = client.legend({"legendFormat": annotation["titleFormat"]}, series.labels)
        found[legend] = [round((t - stack.history_start) / STEP) for t, number in series.points if number]
    return found


def test_annotations(stack: Stack) -> None:
    session = past(stack, "changed", 10, 79)
    assert _moments(stack, session, "Configuration changed") == {"Configuration beef0001": [40, 41, 42, 43]}
    assert _moments(stack, past(stack, "reset", 10, 79), "Configuration changed") == {}
    assert _moments(stack, past(stack, "dead"), "Alert fires") == {"EagleRankGone": list(range(50, 80))}
    assert _moments(stack, past(stack, "reset"), "Alert fires") == {}
    changes = _moments(stack, past(stack, "adaptive", 8, 79), "Step count changed (adaptive)")
    assert [index for index in changes["Step count changed"] if index % 10 == 0] == list(range(10, 80, 10))
    assert _moments(stack, past(stack, "dead", 8, 79), "Step count changed (adaptive)") == {}
    (row,) = rows(session, "eagle-cycle.json", "Speculative decoding")
    assert (row["Config"], row["Steps"]) == ("beef0001", "2")


def test_no_overlap_is_not_an_alarm(stack: Stack) -> None:
    session = past(stack, "changed")
    assert value(session, "eagle-cycle.json", "Host-bound cycles") == -1
    _, panel = find("eagle-cycle.json", "Host-bound cycles")
    mappings = [one["options"] for one in panel["fieldConfig"]["defaults"]["mappings"] if one["type"] == "value"]
    assert mappings[0]["-1"]["text"] == "no overlap"
    assert results(session, "eagle-cycle.json", "Host-bound cycles over time") == {"A": []}


@pytest.mark.parametrize(("server", "last"), [("changed", 79), ("adaptive", 12), ("quiet", 79)])
def test_no_best_step_count_is_named_without_a_baseline(stack: Stack, server: str, last: int) -> None:
    session = past(stack, server, 0, last)
    assert results(session, "eagle-payoff.json", "Best step count, tok/s (estimate)") == {"A": []}


def test_the_band_follows_the_drift(stack: Stack) -> None:
    """1.1 times the usual odds is inside the band, 1.3 times outside: where EagleVerifyShareDrift fires."""
    limit = rules.SHIPPED.verify_drift
    assert 1.1 < limit < 1.3
    for last, drift, inside in ((30, 1.1, True), (70, 1.3, False)):
        lines = named(past(stack, "dead", last - 5, last), "eagle-cycle.json", "Verify share against its baseline")
        share = lines["verify share"]
        usual = share / (1 - share) / drift
        assert lines["band high"] == pytest.approx(usual * limit / (1 + usual * limit), rel=1e-3)
        assert lines["band low"] == pytest.approx(usual / limit / (1 + usual / limit), rel=1e-3)
        assert (lines["band low"] < share < lines["band high"]) == inside


def test_live_traffic_covers_every_batch_size_and_context() -> None:
    """What `test_every_query_returns_data` rests on."""
    from eagle_exporter.registry.layout import context_length_index

    assert [catalogue.batch_size_label(rows) for rows in ROWS] == list(catalogue.BATCH_SIZES)
    assert [context_length_index(context) for context in CONTEXTS] == list(range(len(catalogue.CONTEXT_LENGTHS)))


def test_client_refuses_a_wrong_query(stack: Stack) -> None:
    with pytest.raises(client.QueryError, match="parse error"):
        live(stack).instant("sum by (")
