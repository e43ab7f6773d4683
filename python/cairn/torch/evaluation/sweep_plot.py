"""The picture of a sweep: extra time against peak memory, with lines for predictions and marks for measurements."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..._units import unit_of
from .sweep_data import Measurement, Point, Sweep

STYLES = {
    "selective recomputation": ("tab:green", "o"),
    "whole blocks": ("tab:blue", "s"),
    "plain": ("black", "*"),
    "every block": ("tab:red", "D"),
    "checkpoint_sequential": ("tab:orange", "^"),
    "torch.compile": ("tab:purple", "v"),
}
LABELS = {
    "plain": "plain PyTorch",
    "every block": "every block checkpointed",
    "checkpoint_sequential": "checkpoint_sequential, all k",
    "torch.compile": "torch.compile(aot_eager), memory budgets",
}


def check(path: Path) -> None:
    """Raises where no picture can be drawn to, before much is measured."""
    if path.is_dir():
        raise IsADirectoryError(
            f"plot={path} is a directory; a picture is drawn to a file, such as {path / 'curve.png'}"
        )
    if not path.parent.is_dir():
        raise FileNotFoundError(f"plot={path}: there is no folder {path.parent}")


def draw(sweep: Sweep, curves: Mapping[str, Sequence[Point]], path: Path) -> None:
    """Draws a sweep, its curves through these points; the ending of the path says in which format."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("plot= needs matplotlib: pip install matplotlib") from None
    figure = Figure(figsize=(8, 6), layout="constrained")
    axes = figure.add_subplot()
    peaks = [own.peak_bytes for own in sweep.measured]
    peaks += [point.peak_bytes for curve in curves.values() for point in curve if point.peak_bytes is not None]
    unit, unit_bytes = unit_of(peaks)
    for method, points in curves.items():
        color, marker = STYLES[method]
        shown = "" if sweep.measured or len(points) > len(sweep) else marker
        axes.plot(*_predicted(points, unit_bytes), color=color, marker=shown, label=f"{_label(method)}, predicted")
    for method in STYLES:
        own = [m for m in sweep.measured if m.method == method]
        if own:
            _mark(axes, method, own, unit_bytes)
    figure.legend(loc="outside lower center", ncols=2, fontsize=8)
    axes.set(xlabel=f"peak memory of the step, {unit}", ylabel="extra time, %", title=sweep.model_name)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def _predicted(points: Iterable[Point], unit_bytes: int) -> tuple[list[float], list[float]]:
    drawn = [(p.peak_bytes, p.overhead) for p in points if p.peak_bytes is not None and p.overhead is not None]
    return [peak / unit_bytes for peak, _ in drawn], [100 * overhead for _, overhead in drawn]


def _mark(axes: Any, method: str, measurements: list[Measurement], unit_bytes: int) -> None:
    """Draw the measurements of one method; settings that form a curve of their own are joined and named."""
    color, marker = STYLES[method]
    settings = [m.segments if m.segments is not None else m.activation_memory_budget for m in measurements]
    line = ":" if settings[0] is not None else ""
    peaks, extra = [m.peak_bytes / unit_bytes for m in measurements], [100 * m.overhead for m in measurements]
    axes.plot(peaks, extra, linestyle=line, marker=marker, color=color, label=f"{_label(method)}, measured")
    for at, setting in zip(zip(peaks, extra, strict=True), settings, strict=True):
        if setting is not None:
            axes.annotate(f"{setting:g}", at, textcoords="offset points", xytext=(4, 3), fontsize=7, color=color)


def _label(method: str) -> str:
    return LABELS.get(method, f"Cairn, {method}")
