"""Coverage-guided fuzzing: ``python -m tests.fuzz [READER ...] [--seconds 120]``.

Needs the extra `fuzz` (atheris).

Each reader has a process of its own, which ends with its first finding; the input is kept, and its
path printed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from random import Random

import atheris

with atheris.instrument_imports(include=["perfbench", "nsa", "ruamel"]):
    from tests.fuzz.readers import READERS, survives

MAX_BYTES = 64 * 1024
TIMEOUT_S = 10  # for one input: a reader that needs more can be made to hang
MEMORY_MB = 2048


def main() -> int:
    """0 where no reader has a finding, else 1."""
    asked = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    asked.add_argument(
        "readers", nargs="*", metavar="READER", help=f"all by default: {', '.join(READERS)}"
    )
    asked.add_argument("--seconds", type=int, default=120, help="for each reader")
    asked.add_argument(
        "--out",
        type=Path,
        help="where the corpus and the findings go; a new temporary folder by default",
    )
    # the process of one reader
    asked.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = asked.parse_args()
    names: list[str] = options.readers or list(READERS)
    if unknown := [name for name in names if name not in READERS]:
        asked.error(f"no reader {', '.join(unknown)}; there are {', '.join(READERS)}")
    out = (options.out or Path(tempfile.mkdtemp(prefix="perfbench-fuzz-"))).resolve()
    if options.here:
        fuzz(names[0], options.seconds, out)
    red = []
    for name in names:
        print(f"== {name}: {options.seconds} s, in {out / name}", flush=True)
        command = [
            sys.executable,
            "-m",
            "tests.fuzz",
            name,
            "--seconds",
            str(options.seconds),
            "--out",
            str(out),
            "--here",
        ]
        if subprocess.run(command, check=False).returncode:
            red.append(name)
    print(f"findings: {', '.join(red) or 'none'}; in {out}", flush=True)
    return 1 if red else 0


def fuzz(name: str, seconds: int, out: Path) -> None:
    """Fuzz one reader and end the process, with an exit status that is not 0 after a finding."""
    reader, corpus, scratch = READERS[name], out / name / "corpus", out / name / "scratch"
    corpus.mkdir(parents=True, exist_ok=True)
    scratch.mkdir(exist_ok=True)
    for number, seed in enumerate(reader.seeds()):
        (corpus / f"seed-{number}").write_bytes(seed)

    def mutate(data: bytes, max_size: int, seed: int) -> bytes:
        random = Random(seed)
        if random.random() < 0.3:
            return bytes(atheris.Mutate(data, max_size))
        return reader.mutate(data, random)[:max_size]

    def once(data: bytes) -> None:
        survives(name, data, scratch)

    limits = [
        f"-max_total_time={seconds}",
        f"-max_len={MAX_BYTES}",
        f"-timeout={TIMEOUT_S}",
        f"-rss_limit_mb={MEMORY_MB}",
    ]
    arguments = [
        sys.argv[0],
        *limits,
        f"-artifact_prefix={out / name}/",
        "-print_final_stats=1",
        str(corpus),
    ]
    atheris.Setup(arguments, once, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main())
