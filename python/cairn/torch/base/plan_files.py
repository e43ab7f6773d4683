"""Reading the files of plans."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from .errors import PlanMismatch


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
