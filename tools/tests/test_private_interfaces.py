"""The page about private interfaces names each one that base/_compat/ uses, and none that it does not."""

import ast
import re
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMPAT = ROOT / "python" / "cairn" / "torch" / "base" / "_compat"
PAGE = ROOT / "docs" / "explanation" / "private-interfaces.md"
SOURCES = {path.name: path.read_text() for path in COMPAT.glob("*.py") if path.name != "__init__.py"}
PRIVATE_NAME = re.compile(r"_[A-Za-z]\w*")


def checker():
    loader = SourceFileLoader("check_layers", str(ROOT / "tools" / "check_layers"))
    module = module_from_spec(spec_from_loader("check_layers", loader))
    loader.exec_module(module)
    return module


def test_the_page_names_every_private_interface():
    tool, text = checker(), PAGE.read_text()
    used = {
        (file, name)
        for file, source in SOURCES.items()
        for _, path in tool.uses_of(ast.parse(source))
        if tool.PRIVATE.match(path)
        for name in path.split(".")
        if PRIVATE_NAME.fullmatch(name) or name == path.split(".")[-1]
    }
    assert len(used) > 50
    missing = sorted((file, name) for file, name in used if not re.search(rf"\b{name}\b", text))
    assert not missing


def test_the_page_names_every_private_attribute_that_is_looked_up():
    """`getattr(x, "_name")` and `hasattr(x, "_name")`."""
    text = PAGE.read_text()
    calls = [
        (file, ast.unparse(node.args[1]).strip("'"))
        for file, source in SOURCES.items()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr")
    ]
    used = {(file, name) for file, name in calls if PRIVATE_NAME.fullmatch(name)}
    assert len(used) > 20
    assert not sorted((file, name) for file, name in used if not re.search(rf"\b{name}\b", text))


def test_every_name_on_the_page_is_used():
    sources = "\n".join(SOURCES.values())
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    names = {
        name
        for row in rows
        for span in re.findall(r"`([^`…]+)`", row.split(" | ")[0])
        for name in [span.split(".")[-1]]
    }
    assert len(names) > 60
    assert not sorted(name for name in names if re.fullmatch(r"\w+", name) and name not in sources)


def test_every_file_has_a_place():
    text = PAGE.read_text()
    assert not sorted(name for name in SOURCES if f"`{name}`" not in text)
