"""Fail when a file or a function of the package outgrows one concept."""

import ast
import sys
from pathlib import Path

MAX_FILE_LINES = 300
MAX_FUNCTION_LINES = 40


def oversized(path: Path) -> list[str]:
    """What in this file is over budget."""
    text = path.read_text()
    found = []
    if len(text.splitlines()) > MAX_FILE_LINES:
        found.append(f"{path}: {len(text.splitlines())} lines, at most {MAX_FILE_LINES}")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            length = node.end_lineno - body[0].lineno + 1 if body else 0
            if length > MAX_FUNCTION_LINES:
                where = f"{path}:{node.lineno}"
                found.append(f"{where} {node.name}: {length} lines, at most {MAX_FUNCTION_LINES}")
    return found


def main() -> int:
    """Check the package, the passes and the examples."""
    roots = ("piecewise_backend", "passes", "examples", "benchmarks")
    found = [line for r in roots for p in sorted(Path(r).rglob("*.py")) for line in oversized(p)]
    print("\n".join(found) or "size budget kept")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
