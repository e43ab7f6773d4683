"""Every example in the documentation runs."""

import ast
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RUNNER = Path(__file__).parent / "run_document.py"
BUILD = Path(os.environ.get("CAIRN_BUILD_DIR", ROOT / "build" / "release"))
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
IMPORTS_TORCH = re.compile(r"^(import|from) (torch|cairn\.torch)\b", re.MULTILINE)


def run_documents(paths: list[Path], folder: Path, timeout: int = 300) -> subprocess.CompletedProcess:
    path_list = [str(BUILD / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]
    environment = {**os.environ, "CAIRN_BUILD_DIR": str(BUILD), "PATH": os.pathsep.join(path_list)}
    return subprocess.run(
        [sys.executable, RUNNER, *paths], cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout,
        check=False,
    )  # fmt: skip


@pytest.mark.parametrize("with_torch", [False, True], ids=["without torch", "with torch"])
def test_examples_run(tmp_path, with_torch):
    """All documents of a kind in one process: most of what one with torch takes is importing it."""
    if with_torch and find_spec("torch") is None:
        pytest.skip("an environment without torch")
    documents = [
        path for path in DOCUMENTS if bool(IMPORTS_TORCH.search(path.read_text(encoding="utf-8"))) == with_torch
    ]
    done = run_documents(documents, tmp_path)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)")


def anchors_of(document: Path) -> set[str]:
    """The anchors of a document's headings, as web views of Markdown make them."""
    headings = re.findall(r"^#+ +(.*)$", document.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document):
    for target, anchor in LINK.findall(document.read_text(encoding="utf-8")):
        path = document.parent / target if target else document
        assert path.exists(), f"{target} does not exist"
        assert not anchor or path.suffix != ".md" or anchor in anchors_of(path), f"{target} has no heading {anchor}"


FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
TOO_NEAR = re.compile(r"^ {1,3}(?:(?:\*|\d+\.) |```).*|(?<=\n\n) {1,3}\S.*", re.MULTILINE)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_parts_of_list_items_are_indented_by_four(document):
    """Lists, examples and paragraphs inside an item: with fewer spaces, the site ends the item before them."""
    assert TOO_NEAR.findall(FENCED.sub("", document.read_text(encoding="utf-8"))) == []


def test_every_document_is_reached_from_the_first_one():
    reached, ahead = set(), [ROOT / "README.md"]
    while ahead:
        document = ahead.pop().resolve()
        if document not in reached:
            reached.add(document)
            targets = [document.parent / target for target, _ in LINK.findall(document.read_text(encoding="utf-8"))]
            ahead += [target for target in targets if target.suffix == ".md"]
    assert {path.relative_to(ROOT) for path in DOCUMENTS if path not in reached} == set()


@pytest.mark.parametrize("page, package", [("cairn.md", "cairn"), ("torch.md", "cairn/torch")])
def test_reference_has_every_public_name(page, package):
    """Each as a line `::: NAME`, from which the site makes its description."""
    tree = ast.parse((ROOT / "python" / package / "__init__.py").read_text(encoding="utf-8"))
    public = next(ast.literal_eval(node.value) for node in tree.body if isinstance(node, ast.Assign) and
                  isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__")  # fmt: skip
    text = (ROOT / "docs" / "reference" / page).read_text(encoding="utf-8")
    assert sorted(re.findall(r"^::: [\w.]*?(\w+)$", text, re.MULTILINE)) == sorted(public)


def test_map_of_mechanisms_has_every_file():
    done = subprocess.run([ROOT / "tools" / "count_mechanisms"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def example(tmp_path: Path, text: str) -> subprocess.CompletedProcess:
    document = tmp_path / "document.md"
    document.write_text(text)
    return run_documents([document], tmp_path, timeout=60)


def test_blocks_run_in_order_and_share_a_folder(tmp_path):
    done = example(
        tmp_path,
        "Text.\n<!-- hidden:\n```python\nx = 6\n```\n-->\n```python\nopen('f', 'w').write(str(7 * x))\n```\n"
        "```sh\ntest $(cat f) = 42\n```\n```text\nnot a program\n```\n"
        "<!-- not run: it would fail -->\n```sh\nfalse\n```\n"
        "```c\n#include <cairn/cairn.h>\nint main(void)\n{\n    return !cairn_version();\n}\n```\n",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("-- document.md") == 4
    assert "document.md:21: c" in done.stdout


@pytest.mark.parametrize(
    "block",
    ["```python\n1 / 0\n```", "```sh\nfalse\ntrue\n```", "```c\nint main(void)\n{\n    return 3;\n}\n```",
     "```c\nint main(void)\n{\n    int unused;\n    return 0;\n}\n```", "<!-- not run: -->\n```sh\nfalse\n```"],
)  # fmt: skip
def test_an_example_that_fails_is_found(tmp_path, block):
    assert example(tmp_path, block).returncode != 0
