"""check_layers finds every kind of violation that is planted, and none in the tree itself."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "check_layers"
ROOT = Path(__file__).parents[2]

CLEAN = {
    "src/base/memory.h": "#include <cairn/base.h>\n",
    "src/base/memory.c": '#include "base/memory.h"\n#include <stdlib.h>\n',
    "src/schedule/simulate.c": '#include <cairn/schedule.h>\n#include "base/memory.h"\n',
    "src/solve/solver.h": "#include <cairn/solve.h>\n",
    "src/solve/registry.c": '#include "solve/solver.h"\n#include "solve/chain/chain_dp.h"\n',
    "src/solve/chain/chain_dp.h": '#include "solve/solver.h"\n',
    "src/solve/milp/highs_library.c": "/* highs_c_api.h */\n#include <dlfcn.h>\nvoid f(void) { Highs_run(0); }\n",
    "src/io/json.c": "#include <cairn/io.h>\n#include <jansson.h>\n",
    "src/report/trace.c": "#include <cairn/solve.h>\n#include <cairn/report.h>\n",
    "cli/main.c": '#include "main.h"\n#include <cairn/cairn.h>\n',
    "cli/main.h": "",
    "python/cairn/__init__.py": "import ctypes\nfrom . import _library\n",
    "python/cairn/_library.py": "def plot():\n    import matplotlib.pyplot\n",
    "python/cairn/torch/__init__.py": "import torch\nfrom .. import _library\n",
    "python/cairn/torch/base/tree.py": "import torch\nfrom ... import _budget\nfrom . import stages\n",
    "python/cairn/torch/selective/saved_tensors.py": (
        "from typing import TYPE_CHECKING\nfrom ..base import tree\nfrom . import bit_masks\n"
        "if TYPE_CHECKING:\n    from ..rerun_state.module_state import Record\n"
    ),
    "python/cairn/torch/planning/plan.py": "from ..runtime.step_run import Run\n",
    "python/cairn/torch/base/stages.py": "",
    "python/cairn/torch/base/_compat/compilers.py": "import ctypes\nfrom torch._dynamo import exc\n",
    "python/cairn/torch/api.py": "def f():\n    return torch.ops.aten._to_copy, torch.__version__, f._own\n",
    "python/cairn/torch/head/text.py": 'def f():\n    """' + "A line.\n" * 90 + '"""\n' + "    print()\n" * 60,
    "examples/python/first.py": "import cairn\nimport torch\n",
}

PLANTED = [
    ("src/base/memory.c", '#include "schedule/simulate.h"\n', "schedule/simulate.h"),
    ("src/base/memory.c", "#include <cairn/problem.h>\n", "does not build on problem/"),
    ("src/problem/chain.c", "#  include <cairn/schedule.h>\n", "does not build on schedule/"),
    ("src/schedule/simulate.c", '#include "solve/solver.h"\n', "does not build on solve/"),
    ("src/schedule/simulate.c", "#include <cairn/cairn.h>\n", "umbrella"),
    ("src/schedule/simulate.c", '#include "../base/memory.h"\n', "from src/"),
    ("src/solve/graph/search.c", '#include "solve/chain/chain_dp.h"\n', "each other"),
    ("src/solve/options.c", '#include "solve/chain/chain_dp.h"\n', "each other"),
    ("src/solve/options.c", "#include <cairn/io.h>\n", "does not build on io/"),
    ("src/report/trace.c", "#include <cairn/io.h>\n", "does not build on io/"),
    ("src/report/trace.c", "#include <jansson.h>\n", "jansson"),
    ("src/solve/graph/lp.c", "void f(void) { Highs_run(0); }\n", "HiGHS"),
    ("src/solve/milp/program.c", "void f(void) { Highs_run(0); }\n", "HiGHS"),
    ("src/solve/options.c", "#include <dlfcn.h>\n", "HiGHS"),
    ("src/stray.c", "", "folders of the layers"),
    ("src/solve/graph/chain_dp.h", "", "has the name of"),
    ("cli/main.c", '#include "base/memory.h"\n', "not a public header"),
    ("bench/solvers.c", '#include "../src/base/memory.h"\n', "own folder"),
    ("examples/c/first.c", '#include "solve/solver.h"\n', "not a public header"),
    ("python/cairn/torch/base/tree.py", "from torch._dynamo import exc\n", "base/_compat"),
    ("python/cairn/torch/api.py", "def f():\n    import torch._inductor.config\n", "base/_compat"),
    ("python/cairn/torch/api.py", "def f():\n    torch._dynamo.reset()\n", "base/_compat"),
    ("python/cairn/torch/api.py", "def f():\n    torch.utils._pytree.tree_map(f, ())\n", "torch.utils._pytree"),
    ("python/cairn/torch/api.py", "from torch.utils import _pytree as pytree\n", "torch.utils._pytree"),
    ("python/cairn/torch/api.py", "from torch._ops import OpOverload\n", "base/_compat"),
    ("python/cairn/torch/api.py", "def f(x: torch._ops.OpOverload) -> None:\n    print(x)\n", "torch._ops"),
    ("python/cairn/torch/api.py", "name = operator._schema.name\n", "uses _schema"),
    ("python/cairn/torch/api.py", 'name = getattr(operator, "_schema", None)\n', "uses _schema"),
    ("python/cairn/torch/base/tree.py", "import ctypes\n", "uses ctypes"),
    ("python/cairn/torch/base/tree.py", "def f():\n    from ctypes import memmove\n", "uses ctypes"),
    ("cli/long.c", "\n" * 501, "501 lines"),
    ("bench/long.py", 'def long():\n    """Text."""\n' + "    print()\n" * 61, "long has 61 lines"),
    ("python/cairn/__init__.py", "import torch.nn\n", "imports torch.nn"),
    ("python/cairn/__init__.py", "from torch import nn\n", "imports torch"),
    ("python/cairn/__init__.py", "import numpy\n", "imports numpy"),
    ("python/cairn/__init__.py", "import matplotlib\n", "imports matplotlib"),
    ("python/cairn/__init__.py", "def f():\n    from . import torch\n", "imports cairn.torch"),
    ("python/cairn/torch/base/tree.py", "from ..rerun_state import module_state\n", "base/ does not build on"),
    (
        "python/cairn/torch/rerun_state/module_state.py",
        "from ..schedule.program import Op\n",
        "rerun_state/ does not build on",
    ),
    ("python/cairn/torch/runtime/executor.py", "from ..planning import plan\n", "runtime/ does not build on"),
    ("python/cairn/torch/tracing/tape.py", "import cairn.torch.handle\n", "tracing/ does not build on"),
    (
        "python/cairn/torch/selective/recompute.py",
        "if TYPE_CHECKING:\n    from ..runtime.step_run import Run\n",
        "selective/ does not build on",
    ),
    ("python/cairn/torch/selective/recompute.py", "def f():\n    from .. import api\n", "selective/ does not build on"),
    ("python/cairn/torch/base/stages.py", "from . import tree\n", "a circle of imports"),
    ("python/cairn/torch/more/new.py", "", "no such package"),
    ("demo/run.py", "from cairn._library import load\n", "private"),
    ("examples/python/first.py", "from cairn import _library\n", "private"),
]


def plant(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def check(root: Path) -> tuple[int, str]:
    done = subprocess.run([sys.executable, SCRIPT, root], capture_output=True, text=True, check=False)
    assert not done.stderr
    return done.returncode, done.stdout


def test_a_clean_tree_passes(tmp_path):
    plant(tmp_path, CLEAN)
    assert check(tmp_path) == (0, "")


@pytest.mark.parametrize(("name", "text", "reason"), PLANTED)
def test_a_planted_violation_is_found_with_its_place(tmp_path, name, text, reason):
    plant(tmp_path, CLEAN)
    plant(tmp_path, {name: text})
    code, output = check(tmp_path)
    assert code == 1
    assert all(line.startswith(f"{name}:") for line in output.splitlines())
    assert reason in output


def test_this_tree_passes():
    code, output = check(ROOT)
    assert code == 0, output
