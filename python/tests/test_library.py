"""Finding and loading the library, and what is beside it."""

import ctypes
import inspect
import os
import shutil
import subprocess
import sys
from pathlib import Path

import cairn
import pytest
from cairn import _library

COMPILER = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


def python(code: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_import_needs_neither_torch_nor_numpy() -> None:
    done = python(
        "import sys\nsys.modules['torch'] = sys.modules['numpy'] = None\nimport cairn\n"
        "print(cairn.solve(cairn.Chain([cairn.Stage(1, saved_bytes=1, forward_ns=1, backward_ns=1)], input_bytes=1))"
        ".outcome)\nassert 'cairn.torch' not in sys.modules"
    )
    assert done.stdout == "optimal\n", done.stderr


def test_public_names_exist() -> None:
    assert sorted(cairn.__all__) == sorted(set(cairn.__all__))
    public = {name: getattr(cairn, name) for name in cairn.__all__ if name != "ProgressCallback"}  # an alias
    documented = {name: value for name, value in public.items() if inspect.isclass(value) or inspect.isfunction(value)}
    assert len(documented) > 40 and [name for name, value in documented.items() if not value.__doc__] == []


def test_the_library_that_is_named_is_loaded() -> None:
    folder, name = os.path.split(cairn.get_library())
    same = os.path.join(folder, os.pardir, os.path.basename(folder), name)
    done = python("import cairn; print(cairn.get_library())", CAIRN_LIBRARY=same)
    assert done.stdout == f"{same}\n", done.stderr


def test_a_missing_library_is_an_import_error(tmp_path: Path) -> None:
    done = python("import cairn", CAIRN_LIBRARY=str(tmp_path / "no.so"))
    assert "ImportError: cairn: the C library was not found" in done.stderr
    assert str(tmp_path / "no.so") in done.stderr and "CAIRN_LIBRARY" in done.stderr


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ('const char *cairn_version(void); const char *cairn_version(void) { return "9.9.9"; }', "is version 9.9.9"),
        ("int other; ", "is not Cairn's C library"),
        (None, "cannot load the C library"),
    ],
)
def test_another_library_is_an_import_error(tmp_path: Path, source: str, text: str) -> None:
    library, unit = tmp_path / "libcairn.so", tmp_path / "unit.c"
    if source is None:
        library.write_text("not a library")
    else:
        assert COMPILER, "a C compiler is needed: it built the library"
        unit.write_text(source)
        subprocess.run([*COMPILER.split(), "-shared", "-fPIC", "-o", library, unit], check=True, timeout=60)
    done = python("import cairn", CAIRN_LIBRARY=str(library))
    assert "ImportError" in done.stderr and text in done.stderr and str(library) in done.stderr


def test_what_is_left_out_is_unavailable() -> None:
    missing = _library._missing("cairn_problem_read", Path("libcairn.so"))
    with pytest.raises(cairn.Unavailable, match="libcairn.so has no cairn_problem_read"):
        missing(1, 2)


def test_native_files() -> None:
    assert Path(cairn.get_include(), "cairn", "cairn.h").is_file()
    assert ctypes.CDLL(cairn.get_library()).cairn_version


def test_the_command_line_is_python_dash_m() -> None:
    command = [sys.executable, "-m", "cairn"]
    done = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and cairn.__version__ in done.stdout, done.stderr
    done = subprocess.run([*command, "nonsense"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and done.stderr
