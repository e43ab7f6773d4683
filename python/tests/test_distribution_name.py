"""Another project's package is called `cairn`, too: an import of the wrong one says so."""

import os
import subprocess
import sys
from pathlib import Path

import cairn

OURS = Path(cairn.__file__).parent


def test_torch_part_tells_that_the_package_around_it_is_another_ones(tmp_path):
    """As after `pip install cairn` on top of cairn-budget: one folder, the other one's __init__.py."""
    package = tmp_path / "cairn"
    package.mkdir()
    (package / "torch").symlink_to(OURS / "torch")
    (package / "__init__.py").write_text("")
    done = subprocess.run(
        [sys.executable, "-c", "import cairn.torch"], env={**os.environ, "PYTHONPATH": str(tmp_path)}, cwd=tmp_path,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    said = done.stderr.splitlines()[-1]
    assert said.startswith("ImportError: cairn.torch belongs to the distribution cairn-budget")
    assert str(package) in said and "pip uninstall cairn" in said
