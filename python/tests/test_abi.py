"""The ctypes declarations are those of the C headers: a C compiler compares them."""

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import cairn
import pytest
from cairn import _errors, _library, _structs

COMPILER = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


def compiles(folder: Path, source: str) -> Path:
    """Compiles and links nothing but the headers; fails with what the compiler says."""
    assert COMPILER, "a C compiler is needed: it built the library"
    unit, program = folder / "unit.c", folder / "unit"
    unit.write_text(source)
    command = [*COMPILER.split(), "-std=c11", "-Wall", "-Wextra", "-Werror", f"-I{cairn.get_include()}"]
    result = subprocess.run([*command, "-o", program, unit], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    return program


def is_aggregate(kind: type) -> bool:
    return issubclass(kind, (ctypes.Structure, ctypes.Array))


def layout_source() -> str:
    lines = ["#include <cairn/cairn.h>", "#include <stdio.h>", "int main(void) {"]
    for name, struct in _structs.STRUCTS.items():
        lines.append(f'    printf("%s %zu\\n", "{name}", sizeof({name}));')
        for field, _ in struct._fields_:
            place = f'"{name}.{field}", offsetof({name}, {field}), sizeof((({name} *)0)->{field})'
            lines.append(f'    printf("%s %zu %zu\\n", {place});')
        # One initializer a field: too few are a warning, too many an error.
        values = ", ".join("{0}" if is_aggregate(kind) else "0" for _, kind in struct._fields_)
        lines.append(f"    {name} all_of_{name} = {{{values}}}; (void)all_of_{name};")
    for name in _structs.CONSTANTS:
        lines.append(f'    printf("%s %lld\\n", "{name}", (long long){name});')
    for name in _structs.ENUMS:
        lines.append(f'    printf("%s %zu\\n", "{name}", sizeof({name}));')
    return "\n".join([*lines, "    return 0;", "}", ""])


def test_layout(tmp_path: Path) -> None:
    output = subprocess.run([compiles(tmp_path, layout_source())], capture_output=True, text=True, timeout=60).stdout
    in_c = {line.split()[0]: tuple(map(int, line.split()[1:])) for line in output.splitlines()}
    here = {name: (value,) for name, value in _structs.CONSTANTS.items()}
    here.update({name: (ctypes.sizeof(ctypes.c_int),) for name in _structs.ENUMS})
    for name, struct in _structs.STRUCTS.items():
        here[name] = (ctypes.sizeof(struct),)
        for field, _ in struct._fields_:
            descriptor = getattr(struct, field)
            here[f"{name}.{field}"] = (descriptor.offset, descriptor.size)
    assert here == in_c


def test_prototypes(tmp_path: Path) -> None:
    """A declaration that differs from the header's is an error in C."""
    compiles(tmp_path, f"#include <cairn/cairn.h>\n{_library.PROTOTYPES}\nint main(void) {{ return 0; }}\n")


@pytest.mark.parametrize(
    "wrong", ["int cairn_version(void);", "cairn_status cairn_parse_size(const char *, int64_t, cairn_error *);"]
)
def test_prototypes_are_compared(tmp_path: Path, wrong: str) -> None:
    with pytest.raises(AssertionError, match="conflicting types"):
        compiles(tmp_path, f"#include <cairn/cairn.h>\n{wrong}\nint main(void) {{ return 0; }}\n")


def test_every_prototype_is_parsed() -> None:
    table = _library._prototypes()
    assert len(table) == _library.PROTOTYPES.count(";")
    assert table["cairn_problem_hash"] == (ctypes.c_char_p, [ctypes.POINTER(_structs.Problem)])
    assert table["cairn_version"] == (ctypes.c_char_p, [])
    assert table["cairn_problem_free"] == (None, [ctypes.POINTER(_structs.Problem)])


def test_every_status_is_an_exception_of_the_same_name() -> None:
    names = [name for name in _library.lib.status_names if name != "ok"]
    assert sorted(names) == sorted(_errors.BY_CODE)
    for name in names:
        expected = "".join(part.capitalize() for part in name.split("_"))
        assert getattr(cairn, expected) is _errors.BY_CODE[name]


def test_outcomes_are_those_of_the_library() -> None:
    assert [outcome.value for outcome in cairn.Outcome] == [
        _library.lib.cairn_outcome_name(i).decode() for i in range(len(cairn.Outcome))
    ]


def test_versions_agree() -> None:
    assert cairn.__version__ == _library.lib.cairn_version().decode()
    header = Path(cairn.get_include(), "cairn", "base.h").read_text()
    assert f'CAIRN_VERSION_TEXT "{cairn.__version__}"' in header
