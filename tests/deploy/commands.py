"""What commands in manifests and documentation may look like."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

from tests.sglang.measured import interpreter


def venv_program(name: str) -> str:
    """Return the path of a program of the test environment.

    Raises:
        FileNotFoundError: It is not there.
    """
    path = Path(sys.executable).parent / name
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; run: python3 .ci/environment.py dev")
    return str(path)


@cache
def sglang_options() -> frozenset[str]:
    """Return the options of ``sglang.launch_server``, from the source: the fields of its arguments and the flags."""
    code = "import importlib.util; print(importlib.util.find_spec('sglang').submodule_search_locations[0])"
    root = subprocess.run([interpreter(), "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    options: set[str] = set()
    for path in [Path(root) / "srt" / "server_args.py", *(Path(root) / "srt" / "arg_groups").glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("--"):
                options.add(node.value)
            elif path.name == "field_order.py" and isinstance(node, ast.Constant) and isinstance(node.value, str):
                options.add(f"--{node.value.replace('_', '-')}")  # 0.5.20 names its fields here
            elif isinstance(node, ast.ClassDef):
                fields = [item.target for item in node.body if isinstance(item, ast.AnnAssign)]
                options |= {f"--{field.id.replace('_', '-')}" for field in fields if isinstance(field, ast.Name)}
    assert "--model-path" in options
    assert "--no-such-option" not in options
    return frozenset(options)
