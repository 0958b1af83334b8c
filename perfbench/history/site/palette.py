"""Colours of the charts on light and on dark paper: those of Okabe and Ito, lighter on dark."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Palette:
    """CSS colours. ``others``: of the series that a reader adds."""

    paper: str
    ink: str
    faint: str  # axes, grid and what is in the background
    line: str
    baseline: str
    worse: str
    better: str
    blind: str
    others: tuple[str, ...]


LIGHT = Palette(
    paper="#ffffff",
    ink="#1b1f24",
    faint="#d4d9df",
    line="#0072b2",
    baseline="#5b6470",
    worse="#b84a00",
    better="#00714f",
    blind="#8a6100",
    others=("#b84a00", "#a1467a", "#00714f", "#8a6100", "#5b6470"),
)
DARK = Palette(
    paper="#171a1f",
    ink="#e6e9ed",
    faint="#3a414b",
    line="#56b4e9",
    baseline="#9aa4b0",
    worse="#ff8a3d",
    better="#2fc79a",
    blind="#f0c24b",
    others=("#ff8a3d", "#e79fc6", "#2fc79a", "#f0c24b", "#9aa4b0"),
)
PALETTES = {"light": LIGHT, "dark": DARK}
