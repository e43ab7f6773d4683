"""Options with their values, as a call of the library takes them."""

from __future__ import annotations

import ctypes
import difflib
import warnings
from typing import Any

from . import _structs
from ._library import Handle, lib
from ._machine import Machine, machine_struct
from ._options import option_types
from ._simulate import budget_bytes
from ._solvers import check_solver, has_option, solvers
from ._units import Size, encoded, integer

#: What an option may be set to: a number in the option's unit (bytes, bytes per second, nanoseconds), text as on the
#: command line, True or False for a flag; None leaves it unset.
OptionValue = int | str | bool | None


class OptionSet:
    """A cairn_options with its values set."""

    def __init__(self) -> None:
        pointer = ctypes.POINTER(_structs.Options)()
        lib.check(lib.cairn_options_new, None, ctypes.byref(pointer))
        self._handle = Handle(pointer, lib.cairn_options_free)

    @property
    def pointer(self) -> Any:
        return self._handle.pointer

    def set(self, name: str, value: OptionValue) -> None:
        """Sets one option through the library's parser."""
        key = name.replace("_", "-")
        kind = option_types().get(key)
        if kind is None:
            raise TypeError(no_such_option(name))
        if value is None:
            return
        if key == "solver" and isinstance(value, str):
            check_solver(value)
        if isinstance(value, bool) and kind == "flag":
            value = "true" if value else "false"
        if isinstance(value, str):
            lib.check(lib.cairn_options_set, self.pointer, key.encode(), encoded(value, name))
        elif isinstance(value, bool) or not hasattr(value, "__index__") or kind not in _EXAMPLES:
            raise TypeError(f"{name} must be {_EXAMPLES.get(kind, 'text')}, not {value!r}")
        else:
            lib.check(lib.cairn_options_set_int, self.pointer, key.encode(), integer(value, name))

    def set_machine(self, machine: Machine | None) -> None:
        """Overrides the problem's machine."""
        if machine is None:
            return
        machine_struct(machine)
        self.set("host_budget", machine.host_bytes)
        self.set("to_host", machine.to_host_bytes_per_s)
        self.set("to_device", machine.to_device_bytes_per_s)
        self.set("latency", machine.latency_ns)
        self.set("shared_link", machine.shared_link)

    def set_budget(self, budget: Size | None) -> None:
        """Sets the budget; None is none."""
        limit = budget_bytes(budget)
        self.set("budget", "none" if limit == _structs.NONE else limit)


_EXAMPLES = {
    "size": "an integer number of bytes or text such as '8GiB'",
    "rate": "an integer number of bytes per second or text such as '12GB/s'",
    "duration": "an integer number of nanoseconds or text such as '500ms'",
    "count": "an integer",
}


def no_such_option(name: str) -> str:
    names = [option.replace("-", "_") for option in option_types()]
    near = difflib.get_close_matches(name, names, n=1)
    return f"there is no option {name!r}; " + (
        f"did you mean {near[0]!r}?" if near else f"there are {', '.join(names)}"
    )


def chosen_options(solver: str, machine: Machine | None, values: dict[str, OptionValue]) -> OptionSet:
    chosen = OptionSet()
    chosen.set("solver", solver)
    chosen.set_machine(machine)
    for name, value in values.items():
        chosen.set(name, value)
    return chosen


def warn_of_unused(solver: str, values: dict[str, OptionValue]) -> None:
    """The options that were set and that the solver, which refused none, does not use."""
    types = option_types()
    for name, value in values.items():
        if value is None or types.get(name.replace("_", "-")) == "choice":  # which was not refused
            continue
        if has_option("auto", name) and not has_option(solver, name):
            owners = ", ".join(info.name for info in solvers() if name in info.options)
            warnings.warn(f"{solver} has no use for {name}; these have: {owners}", stacklevel=3)
