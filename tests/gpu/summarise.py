"""Merges the parts that ``run.py`` wrote into ``results.json``: the figures that the README quotes.

usage: python tests/gpu/summarise.py OUT [results.json]   (a part that is not in OUT keeps its last figures)
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def _round(value: Any, digits: int = 6) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{digits}g}")
    if isinstance(value, dict):
        return {key: _round(entry, digits) for key, entry in value.items()}
    if isinstance(value, list):
        return [_round(entry, digits) for entry in value]
    return value


def main(arguments: list[str]) -> int:
    """Merge and write."""
    source = Path(arguments[0])
    target = Path(arguments[1]) if len(arguments) > 1 else Path(__file__).with_name("results.json")
    results: dict[str, Any] = json.loads(target.read_text()) if target.exists() else {}
    for path in sorted(source.glob("*.json")):
        part = json.loads(path.read_text())
        if isinstance(part, dict) and "gpu" in part:
            results[path.stem] = _round(part)
    target.write_text(json.dumps(results, indent=1) + "\n")
    print(f"{target}: {', '.join(results)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
