"""Runs every query of every dashboard against a Prometheus and says which panels have no data.

python grafana/check.py --prometheus http://127.0.0.1:9090 --from 5m --var job=eagle-exporter
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

HERE = Path(__file__).resolve().parent
if str(HERE.parent) not in sys.path:  # run from a checkout, installed or not
    sys.path.insert(0, str(HERE.parent))

from grafana import client  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Check all dashboards.

    Returns:
        0; 1 when Prometheus refuses a query or cannot be asked. A panel without data is no error: the figure may
        not exist there.
    """
    parser = argparse.ArgumentParser(description="Run every query of every dashboard against a Prometheus.")
    client.add_session_arguments(parser)
    chosen = parser.parse_args(arguments)
    session = client.session_of(chosen, time.time())
    refused = empty = total = 0
    for path in sorted((HERE / "dashboards").glob("*.json")):
        document = client.load(path)
        for panel in client.panels(document):
            for target in panel["targets"]:
                total += 1
                name = f"{document['title']} / {panel['title']} / {target['refId']}"
                try:
                    answer = session.run(document, target)
                except client.QueryError as error:
                    refused += 1
                    print(f"refused  {name}: {error}")
                    continue
                except OSError as error:
                    print(f"cannot ask Prometheus at {chosen.prometheus}: {error}", file=sys.stderr)
                    return 1
                if not answer:
                    empty += 1
                    print(f"no data  {name}  ({panel['fieldConfig']['defaults']['noValue']})")
    print(f"{total} queries: {refused} refused, {empty} without data")
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main())
