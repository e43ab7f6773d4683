"""Operations of schedules, as files write them and as C has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import _structs
from ._errors import BadInput
from ._library import lib
from ._units import INT32_MAX, integer

#: One operation as in files: ("forward_save", 1, 0), ("backward", 1), ("drop", "output", 2), ("compute", 7).
Op = tuple[str | int, ...]
_VALUES = ("output", "saved")
_OPTION_MAX = 63


def _op_names() -> tuple[str, ...]:
    names: list[str] = []
    while (name := lib.cairn_op_name(len(names))) is not None:
        names.append(name.decode())
    return tuple(names)


_OP_NAMES = _op_names()
_OP_CODES = {name: code for code, name in enumerate(_OP_NAMES)}
_FORWARD_SAVE = _OP_CODES["forward_save"]
_MOVES = frozenset(_OP_CODES[name] for name in ("drop", "offload", "prefetch", "discard"))


def _op_shape(code: int, is_chain: bool) -> str:
    if code in _MOVES and is_chain:
        return f'("{_OP_NAMES[code]}", "output" or "saved", index)'
    return f'("{_OP_NAMES[code]}", index{", option" if code == _FORWARD_SAVE else ""})'


def op_struct(op: Sequence[Any], position: int, is_chain: bool) -> _structs.Op:
    def refuse(message: str) -> BadInput:
        return BadInput(message, index=position, path=f"ops[{position}]")

    if isinstance(op, (str, bytes)) or not isinstance(op, Sequence) or not op:
        raise refuse(f"an operation is a tuple such as ('backward', 1), not {op!r}")
    code = _OP_CODES.get(op[0]) if isinstance(op[0], str) else None
    if code is None:
        raise refuse(f"{op[0]!r} is not an operation; there are {', '.join(_OP_NAMES)}")
    rest = list(op[1:])
    value = option = 0
    if code in _MOVES and is_chain:
        if len(rest) != 2 or rest[0] not in _VALUES:
            raise refuse(f"{op!r}: expected {_op_shape(code, is_chain)}")
        value = _VALUES.index(rest.pop(0))
    elif code == _FORWARD_SAVE and len(rest) == 2:
        option = integer(rest.pop(), "option", f"ops[{position}]")
    if len(rest) != 1:
        raise refuse(f"{op!r}: expected {_op_shape(code, is_chain)}")
    index = integer(rest[0], "index", f"ops[{position}]")
    for what, number, most in (("option", option, _OPTION_MAX), ("index", index, INT32_MAX)):
        if not 0 <= number <= most:  # no problem has these; the library knows what this one has
            raise refuse(f"{op!r}: the {what} is {number}, out of range: 0 to {most}")
    return _structs.Op(code, value, option, index)


def op_tuple(op: _structs.Op, is_chain: bool) -> Op:
    name = _OP_NAMES[op.code]
    if op.code == _FORWARD_SAVE:
        return name, op.index, op.option
    if is_chain and op.code in _MOVES:
        return name, _VALUES[op.value], op.index
    return name, op.index
