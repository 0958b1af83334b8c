"""Does NSA learn what dense attention learns? Curves with bands, from runs of `nsa.train`.

    python -m tools.studies.learning collect RUN... [--blocks FILE] [--about TEXT] --out GZ
    python -m tools.studies.learning render GZ --out FOLDER

A run is the folder that `python -m nsa.train` wrote. Everything in the report is computed from the
collected file; seeds of one configuration are one curve, its band is the least to the most of them.
A FILE is what `python -m nsa.train blocks` wrote of one of the runs; repeat --blocks for several.
A TEXT is a line of the report, such as the origin and the licence of what was read.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from nsa.train.blocks_text import blocks_head, blocks_table

COLOURS = {"nsa": "#0b5fbe", "dense": "#c2410c"}
WITHIN_PCT = 2.0  # of dense: what the report is asked
LINE_KEYS = ("step", "loss_nats", "tokens_per_s", "bad_steps", "gradient_norm")


class UnusableRun(ValueError):
    """A run that the report cannot take: got, wanted, next."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Held-out bits a byte of several seeds: {step: [one a seed]}; only steps that all have."""

    attention: str
    seeds: tuple[int, ...]
    bits: dict[int, list[float]]
    tokens_per_step: int

    @property
    def last_step(self) -> int:
        return max(self.bits)

    @property
    def best(self) -> list[float]:
        """The least of each seed."""
        return [min(of_step) for of_step in zip(*self.bits.values(), strict=True)]


def collect(folder: Path) -> dict[str, Any]:
    """What the report needs of a run: its config, its events and the numbers of its lines."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    lines = []
    events = []
    for text in (folder / "log" / "rank0.jsonl").read_text(encoding="utf-8").splitlines():
        try:
            line = json.loads(text)
        except json.JSONDecodeError:  # torn by a kill
            continue
        if "learning_rate" in line:
            lines.append({key: line[key] for key in LINE_KEYS})
        elif line.get("kind") in ("start", "eval", "done", "end", "go_no_go"):
            events.append(line)
    if not any(event["kind"] == "eval" for event in events):
        raise UnusableRun(
            f"{folder} has no evaluation; wanted held-out losses; train with train.eval_every > 0"
        )
    return {"name": folder.name, "config": config, "events": events, "lines": _of_last(lines)}


def add_blocks(runs: Sequence[dict[str, Any]], file: Path) -> None:
    """Keep what a file of blocks says of itself with the run that it is of."""
    try:
        with np.load(file, allow_pickle=False) as arrays:
            about = json.loads(str(arrays["about"]))
        sha256 = about["run"]["config_sha256"]
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise UnusableRun(
            f"--blocks {file} is no file of blocks ({error}); wanted one that `python -m nsa.train"
            " blocks` wrote; write it again"
        ) from None
    own = [run for run in runs if run["config"]["sha256"] == sha256]
    if not own:
        raise UnusableRun(
            f"--blocks {file} is of the run {about['run']['name']} (config {str(sha256)[:12]}),"
            " which is not collected here; name that run, too"
        )
    own[0].setdefault("blocks", []).append(about)


def _of_last(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One line a step: a run that resumed has written some twice, and the later ones hold."""
    return list({line["step"]: line for line in lines}.values())


def curves(runs: Sequence[dict[str, Any]]) -> dict[str, Curve]:
    """By attention; UnusableRun where runs differ in more than attention and seed."""
    settings = {json.dumps(_shared(run), sort_keys=True) for run in runs}
    if len(settings) > 1:
        raise UnusableRun(
            f"got runs of {len(settings)} settings; wanted ones that differ in attention and seed"
            " alone; collect them apart"
        )
    found = {}
    for attention in ("nsa", "dense"):
        own = [run for run in runs if run["config"]["config"]["train"]["attention"] == attention]
        if own:
            found[attention] = _curve(attention, own)
    return found


def _shared(run: dict[str, Any]) -> dict[str, Any]:
    config = json.loads(json.dumps(run["config"]["config"]))
    for name in ("attention", "seed", "path"):
        config["train"].pop(name)
    for name in ("out", "log", "watchdog", "checkpoint"):
        config.pop(name)
    for name in ("seed", "workers"):
        config["data"].pop(name)
    return config  # type: ignore[no-any-return]


def _curve(attention: str, runs: list[dict[str, Any]]) -> Curve:
    by_seed = {
        run["config"]["config"]["train"]["seed"]: {
            event["step"]: event["bits_per_byte"]
            for event in run["events"]
            if event["kind"] == "eval"
        }
        for run in runs
    }
    steps = sorted(set.intersection(*(set(of_seed) for of_seed in by_seed.values())))
    train = runs[0]["config"]["config"]["train"]
    return Curve(
        attention,
        tuple(sorted(by_seed)),
        {step: [by_seed[seed][step] for seed in sorted(by_seed)] for step in steps},
        train["batch"] * train["accumulate"] * train["seq_len"],
    )


def picture(found: dict[str, Curve]) -> Figure:
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    for curve in found.values():
        x = [step * curve.tokens_per_step / 1e6 for step in curve.bits]
        colour = COLOURS[curve.attention]
        label = f"{curve.attention}, {len(curve.seeds)} seeds"
        axes.plot(x, [fmean(b) for b in curve.bits.values()], color=colour, label=label)
        low, high = ([pick(b) for b in curve.bits.values()] for pick in (min, max))
        axes.fill_between(x, low, high, color=colour, alpha=0.2, linewidth=0)
    axes.set_xlabel("million tokens trained on")
    axes.set_ylabel("held-out bits a byte")
    axes.grid(color="#e4e4e4")
    axes.legend(frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure


def report(
    runs: Sequence[dict[str, Any]], found: dict[str, Curve], about: Sequence[str] = ()
) -> str:
    """Markdown: the answer first, then each run."""
    lines = [f"# {_headline(found)}", "", "![Held-out bits a byte over tokens](learning.png)", ""]
    lines += [*_settings(runs[0]), *(f"- {line}" for line in about)]
    lines += ["", "| attention | seeds | held-out bits a byte at the end | best | tok/s |"]
    lines += ["| --- | ---: | ---: | ---: | ---: |"]
    for curve in found.values():
        end = curve.bits[curve.last_step]
        speeds = [
            median(line["tokens_per_s"] for line in run["lines"] if line["tokens_per_s"])
            for run in runs
            if run["config"]["config"]["train"]["attention"] == curve.attention
        ]
        lines.append(
            f"| {curve.attention} | {', '.join(map(str, curve.seeds))} | {_band(end)} |"
            f" {_band(curve.best)} | {median(speeds):,.0f} |"
        )
    lines += [
        "",
        "| run | attention | seed | held-out bits a byte | steps | starts | bad | config |",
    ]
    lines += ["| --- | --- | ---: | ---: | ---: | ---: | ---: | --- |"]
    for run in runs:
        train = run["config"]["config"]["train"]
        last = run["lines"][-1]
        kinds = [event["kind"] for event in run["events"]]
        bits = [event["bits_per_byte"] for event in run["events"] if event["kind"] == "eval"][-1]
        lines.append(
            f"| {run['name']} | {train['attention']} | {train['seed']} | {bits:.4f} |"
            f" {last['step']} | {kinds.count('start')} | {last['bad_steps']} |"
            f" `{run['config']['sha256'][:12]}` |"
        )
    for run in runs:
        for about in run.get("blocks", ()):
            lines += ["", *_blocks(about)]
    return "\n".join(lines) + "\n"


def _blocks(about: dict[str, Any]) -> list[str]:
    head, *rows = blocks_table(about)
    return [
        f"## Chosen blocks of {blocks_head(about)}",
        "",
        "A query chooses where it sees more blocks than it has slots; free blocks are those that it"
        " chose and that are not forced. A distance is in blocks.",
        "",
        f"| {' | '.join(head)} |",
        f"| --- |{' ---: |' * (len(head) - 1)}",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]


def _headline(found: dict[str, Curve]) -> str:
    if set(found) != {"nsa", "dense"}:
        return f"Only {', '.join(found)}: nothing to compare"
    shared = min(curve.last_step for curve in found.values())
    nsa, dense = (fmean(found[name].bits[shared]) for name in ("nsa", "dense"))
    change = 100 * (nsa / dense - 1)
    verdict = "within" if change <= WITHIN_PCT else "NOT within"
    return (
        f"NSA {nsa:.4f} and dense {dense:.4f} held-out bits a byte ({change:+.2f} %), {verdict}"
        f" {WITHIN_PCT:g} %, after {shared:,} steps"
    )


def _settings(run: dict[str, Any]) -> list[str]:
    config = run["config"]["config"]
    start = next(event for event in run["events"] if event["kind"] == "start")
    train = config["train"]
    return [
        f"- {start['device']}, torch {start['torch']}; {start['world_size']} process;"
        f" {train['precision']}, CUDA graph {start['cuda_graph']}, compiled {train['compile']}",
        f"- {train['batch']} x {train['accumulate']} sequences of {train['seq_len']:,} tokens a"
        f" step, lr {train['lr']:g} ({train['schedule']})",
        f"- data: {json.dumps(start['data'])}",
    ]


def _band(values: Sequence[float]) -> str:
    if any(not math.isfinite(value) for value in values):
        return "not finite"
    if len(values) == 1:
        return f"{values[0]:.4f}"
    return f"{fmean(values):.4f} ({min(values):.4f} to {max(values):.4f})"


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("collect")
    one.add_argument("runs", nargs="+", type=Path)
    one.add_argument("--out", type=Path, required=True)
    one.add_argument("--blocks", action="append", default=[], type=Path, metavar="FILE")
    one.add_argument("--about", action="append", default=[], metavar="TEXT")
    two = commands.add_parser("render")
    two.add_argument("file", type=Path)
    two.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(argv)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    try:
        if options.command == "collect":
            collected = [collect(folder) for folder in options.runs]
            for file in options.blocks:
                add_blocks(collected, file)
            text = json.dumps({"about": options.about, "runs": collected})
            options.out.write_bytes(gzip.compress(text.encode(), mtime=0))
            return 0
        read = json.loads(gzip.decompress(options.file.read_bytes()))
        runs = read["runs"]
        found = curves(runs)
    except UnusableRun as error:
        sys.stderr.write(f"learning: {error}\n")
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    picture(found).savefig(options.out / "learning.png", dpi=120)
    (options.out / "report.md").write_text(report(runs, found, read["about"]), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
