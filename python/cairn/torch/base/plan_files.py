"""Reading and writing the files of plans."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import PlanMismatch


def write_json(path: str | os.PathLike[str], data: Mapping[str, Any], indent: int | None = None) -> None:
    """Write a file of JSON as a whole: a write that fails leaves the file as it was."""
    target = Path(path)
    if target.is_dir():
        raise IsADirectoryError(f"{target} is a directory; a plan is saved to a file, such as {target / 'plan.json'}")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"{target}: there is no folder {target.parent}")
    unfinished = target.with_name(target.name + ".unfinished")
    try:
        unfinished.write_text(json.dumps(data, indent=indent) + "\n", encoding="utf-8")
        unfinished.replace(target)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def read_json(path: str | os.PathLike[str]) -> Any:
    """The content of a file of JSON. Raises PlanMismatch, with the position, for a file that is none or ends early."""
    try:
        return json.loads(Path(path).read_bytes())
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise PlanMismatch(f"{path} is no plan, or not a whole one: {where}: {error.msg}") from None
    except UnicodeDecodeError as error:
        raise PlanMismatch(f"{path} is no plan: byte {error.start} is not text") from None


def read_plan(path: str | os.PathLike[str], name: str, version: int) -> dict[str, Any]:
    """The fields of a plan of a format, by its name and version. Raises PlanMismatch for another format."""
    data = read_json(path)
    if not isinstance(data, dict) or data.get("format") != name or data.get("version") != version:
        raise PlanMismatch(f"{path} is no {name} of version {version}")
    return data
