"""Where a run is made, and the only os.environ of perfbench.

Imports no torch and touches no CUDA.
"""

from __future__ import annotations

import ast
import importlib.metadata
import json
import os
import platform
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from perfbench.errors import Exit, PerfbenchError
from perfbench.machine import nvml
from perfbench.machine.gpu import GpuHandle, blindness, matches, visible
from perfbench.records import Environment, read_regular_file

if TYPE_CHECKING:
    from nsa.routing import UserTable

# What changes speed, and what of it names places or output alone.
SPEED_PREFIXES = (
    "OMP_",
    "KMP_",
    "GOMP_",
    "MKL_",
    "OPENBLAS_",
    "DNNL_",
    "ONEDNN_",
    "MALLOC_",
    "CUBLAS",
    "CUDNN_",
    "TORCHINDUCTOR_",
    "TORCHDYNAMO_",
    "TORCH_COMPILE_",
    "TORCH_BLAS_",
    "TORCH_CUDNN_",
    "TORCH_ALLOW_",
    "TRITON_",
)
SPEED_VARIABLES = frozenset(
    (
        "ATEN_CPU_CAPABILITY",
        "CUDA_AUTO_BOOST",
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "CUDA_DISABLE_PTX_JIT",
        "CUDA_FORCE_PTX_JIT",
        "CUDA_LAUNCH_BLOCKING",
        "CUDA_MODULE_LOADING",
        "GLIBC_TUNABLES",
        "LD_PRELOAD",
        "NVIDIA_TF32_OVERRIDE",
        "PYTORCH_ALLOC_CONF",
        "PYTORCH_CUDA_ALLOC_CONF",
        "PYTORCH_JIT",
        "PYTORCH_NO_CUDA_MEMORY_CACHING",
        "PYTORCH_NVML_BASED_CUDA_CHECK",
    )
)
HISTORY_FILE = Path("reports/history.sqlite")
NO_HISTORY = "none"  # instead of a URL: no history, whatever else is configured
MAX_EVENT_BYTES = 2**25  # GitHub's own limit of an event is 25 MB
_PULL = re.compile(r"refs/pull/([1-9]\d{0,17})/(?:merge|head)")
_PAGE = re.compile(r"https?://[\w.:-]+/[\w.-]+/[\w.-]+/actions/runs/\d+")
ARM_KEYS = ("CPU implementer", "CPU part")
THRESHOLDS, TABLE_OFF = "NSA_THRESHOLDS", "off"  # spelled out: an older nsa knows none
NO_SPEED_ENDINGS = ("_DIR", "_PATH", "_HOME", "_LOG_FILE", "_LOGS", "_VERBOSE")


def environment_variable(name: str, environ: Mapping[str, str] | None = None) -> str | None:
    """An environment variable, or None; perfbench acts on CUDA_*, NO_COLOR, CI, GITHUB_*,
    PERFBENCH_HISTORY and PERFBENCH_WEBHOOK only, and reads them only here.
    """
    return (os.environ if environ is None else environ).get(name)


def speed_variables(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Variables that change how fast PyTorch, Triton, CUDA and the libraries below them run; NSA_*
    are `nsa_settings`.
    """
    found = os.environ if environ is None else environ
    return {
        name: found[name]
        for name in sorted(found)
        if (name in SPEED_VARIABLES or name.startswith(SPEED_PREFIXES))
        and not name.endswith(NO_SPEED_ENDINGS)
    }


def give(variables: Mapping[str, str]) -> None:
    """Set variables of this process: a measuring process's own, before nsa reads its settings."""
    os.environ.update(variables)


def settings_to_adopt(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables of this process that decide what is measured and how fast: NSA_* and
    `speed_variables`.
    """
    found = os.environ if environ is None else environ
    nsa = {name: found[name] for name in sorted(found) if name.startswith("NSA_")}
    return {**nsa, **speed_variables(found)}


def adopt_settings(wanted: Mapping[str, str]) -> None:
    """Make `settings_to_adopt` of this process be ``wanted``, before nsa reads its own: a cluster's
    scheduler sets some (Ray OMP_NUM_THREADS), and a run has the same on every node.
    """
    for name in settings_to_adopt():
        if name not in wanted:
            del os.environ[name]
    give(wanted)
    from nsa import settings

    settings.current.cache_clear()


@contextmanager
def without_variables(*names: str) -> Iterator[None]:
    """This process without these variables, which a library would read at its import."""
    # put back below: a notebook's MPLBACKEND would decide how a run ends
    kept = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(kept)


def compiling_environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """For a process that compiles what nsa launches by default: without nsa's settings and without
    Triton's interpreter; Triton's own variables stay.
    """
    found = os.environ if environ is None else environ
    kept = {name: value for name, value in found.items() if not name.startswith("NSA_")}
    kept.pop("TRITON_INTERPRET", None)
    return {**kept, "OMP_NUM_THREADS": "1"}


def no_color(environ: Mapping[str, str] | None = None) -> bool:
    """https://no-color.org: set and not empty."""
    return bool(environment_variable("NO_COLOR", environ))


def step_summary(environ: Mapping[str, str] | None = None) -> Path | None:
    """The file that GitHub shows on the page of a workflow run."""
    path = environment_variable("GITHUB_STEP_SUMMARY", environ)
    return Path(path) if path else None


def configured_history(
    url: str | os.PathLike[str] | None = None, environ: Mapping[str, str] | None = None
) -> str | None:
    """The address of a history: ``url``, else PERFBENCH_HISTORY, else reports/history.sqlite where
    that file exists; None where there is none, or where `none` is written.
    """
    here = str(HISTORY_FILE) if HISTORY_FILE.is_file() else None
    variable = environment_variable("PERFBENCH_HISTORY", environ) or None
    found = (variable or here) if url is None else os.fspath(url)
    return None if found == NO_HISTORY else found


def configured_webhook(
    url: str | None = None, environ: Mapping[str, str] | None = None
) -> str | None:
    """The address that verdicts are posted to, a secret: ``url``, else PERFBENCH_WEBHOOK; None
    where there is none.
    """
    variable = environment_variable("PERFBENCH_WEBHOOK", environ)
    return (variable if url is None else url) or None


def workflow_page(environ: Mapping[str, str] | None = None) -> str:
    """The address of the workflow run on GitHub, where summary and artifacts are; '' elsewhere."""
    names = ("GITHUB_SERVER_URL", "GITHUB_REPOSITORY", "GITHUB_RUN_ID")
    server, repository, number = (environment_variable(name, environ) or "" for name in names)
    page = f"{server}/{repository}/actions/runs/{number}"
    return page if _PAGE.fullmatch(page) else ""


def pull_request_number(environ: Mapping[str, str] | None = None) -> int | None:
    """Of the event that GitHub runs; None where it has none, as a schedule."""
    if path := environment_variable("GITHUB_EVENT_PATH", environ):
        try:
            event = json.loads(read_regular_file(Path(path), MAX_EVENT_BYTES))
            number = event["pull_request"]["number"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            number = None
        if isinstance(number, int):
            return number
    found = _PULL.fullmatch(environment_variable("GITHUB_REF", environ) or "")
    return int(found[1]) if found else None


def visible_gpus(
    *, module: Any | None = None, environ: Mapping[str, str] | None = None
) -> tuple[list[GpuHandle], str]:
    """GPUs in the order in which CUDA numbers them, or ([], reason)."""
    return visible(
        environment_variable("CUDA_VISIBLE_DEVICES", environ),
        environment_variable("CUDA_DEVICE_ORDER", environ),
        module,
    )


def visible_gpu(
    *, module: Any | None = None, environ: Mapping[str, str] | None = None
) -> tuple[GpuHandle | None, str]:
    """The GPU that torch will call cuda:0, or (None, reason)."""
    gpus, reason = visible_gpus(module=module, environ=environ)
    return (gpus[0], "") if gpus else (None, reason)


def version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def torch_cuda() -> str | None:
    """The CUDA version that the installed torch was built for; read from its version.py, because
    importing it takes seconds.
    """
    try:
        file = importlib.metadata.distribution("torch").locate_file("torch/version.py")
        tree = ast.parse(Path(str(file)).read_text(encoding="utf-8"))
    except (importlib.metadata.PackageNotFoundError, OSError, SyntaxError, UnicodeDecodeError):
        return None
    for node in tree.body:
        targets = (
            [node.target]
            if isinstance(node, ast.AnnAssign)
            else node.targets
            if isinstance(node, ast.Assign)
            else []
        )
        if any(isinstance(target, ast.Name) and target.id == "cuda" for target in targets):
            value = node.value  # type: ignore[attr-defined]  # only assignments have targets
            return (
                value.value
                if isinstance(value, ast.Constant) and isinstance(value.value, str)
                else None
            )
    return None


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    fields_of: dict[str, dict[str, None]] = {}  # by key, the values in the order of the file
    for line in lines:
        key, _, value = line.partition(":")
        if value.strip():
            fields_of.setdefault(key.strip(), {})[value.strip()] = None
    if models := fields_of.get("model name"):
        return next(iter(models))
    # ARM names no model; "aarch64" alone would be every one of them.
    kind = platform.processor() or platform.machine()
    parts = [f"{key[4:]} {' + '.join(fields_of[key])}" for key in ARM_KEYS if key in fields_of]
    return ", ".join(filter(None, [kind, *parts])) or "unknown CPU"


def cpu_count() -> int:
    """Processors that this process may use, which a container may have narrowed."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def nsa_settings() -> dict[str, str]:
    """NSA_* settings that the environment gives, as a run records and compares them: a table of
    thresholds by its content, and none for `off`, which is how perfbench measures anyway.

    USAGE for an unknown one, and for a table that cannot be used.
    """
    from nsa import settings

    try:
        given = settings.current().given()
        file = thresholds_file(given)
        given.pop(THRESHOLDS, None)
        if file is not None:
            given[THRESHOLDS] = f"sha256:{parse_table(file).sha256}"
    except ValueError as error:
        raise PerfbenchError(Exit.USAGE, str(error)) from None
    return given


def thresholds_file(given: Mapping[str, str]) -> str | None:
    """The table of thresholds that ``given`` NSA_* settings name."""
    file = given.get(THRESHOLDS)
    return None if file == TABLE_OFF else file


def parse_table(file: str) -> UserTable:
    """ValueError for one that cannot be read or used."""
    from nsa.thresholds_file import bytes_of, parse

    try:
        return parse(bytes_of(file), file)
    except OSError as error:
        raise ValueError(
            f"{THRESHOLDS}={file} cannot be read: {error.strerror or error}; wanted a table that"
            " `perfbench tune --apply` wrote, or off"
        ) from None


def without_users_table() -> dict[str, str]:
    """What a process that measures or plans is given, so that no file in a home changes what it
    runs: nothing where a table was named, or where this nsa knows none.
    """
    from nsa.settings import MEANINGS

    if THRESHOLDS not in MEANINGS or THRESHOLDS in os.environ:
        return {}
    return {THRESHOLDS: TABLE_OFF}


def _named_table() -> str | None:
    from nsa import settings

    return thresholds_file(settings.current().given())


def collect_environment(
    device: str, *, module: Any | None = None, environ: Mapping[str, str] | None = None
) -> Environment:
    """Describe this machine for a run on ``device`` ('cpu' or 'cuda'); ENVIRONMENT where CUDA would
    find no GPU.
    """
    from nsa.capability import fa2_provider, torch_version

    here: dict[str, Any] = {
        "torch": torch_version(),
        "triton": version("triton") or version("pytorch-triton"),
        "flash_provider": fa2_provider()[0],
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_name": cpu_name(),
        "cpu_count": cpu_count(),
        "nsa_settings": nsa_settings(),
        "thresholds_file": _named_table(),
        "speed_variables": speed_variables(environ),
    }
    if not device.startswith("cuda"):
        nothing: dict[str, Any] = dict.fromkeys(("gpu_uuid_sha256", "driver", "cuda"))
        return Environment(
            gpu_slug="cpu",
            device_name=here["cpu_name"],
            clock_policy=_cpu_clock_policy(),
            **nothing,
            **here,
        )
    gpu, reason = visible_gpu(module=module, environ=environ)
    if gpu is None:
        raise PerfbenchError(
            Exit.ENVIRONMENT,
            f"no GPU to measure on: {reason}. Next: `perfbench doctor`, or a matrix with `gpu:"
            " none`",
        )
    with nvml.nvml_session(module) as opened:
        driver, _ = nvml.nvml_query(opened, "nvmlSystemGetDriverVersion")
        policy = _gpu_clock_policy(opened, gpu.uuid)
    return Environment(
        gpu_slug=gpu.slug,
        device_name=gpu.name,
        gpu_uuid_sha256=gpu.uuid_sha256,
        driver=nvml.text(driver) if driver else None,
        cuda=torch_cuda(),
        clock_policy=policy,
        **here,
    )


def _cpu_clock_policy(
    governor: Path = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
) -> str:
    try:
        return f"governor {governor.read_text(encoding='ascii').strip()}"
    except (OSError, UnicodeDecodeError):
        return "unknown (the kernel shows no governor, as in most virtual machines)"


def _gpu_clock_policy(module: Any, uuid: str) -> str:
    """NVML cannot say whether clocks are locked; the limits and persistence are what can be
    known.
    """
    handle, missing = nvml.nvml_query(module, "nvmlDeviceGetHandleByUUID", uuid)
    if missing:
        return f"unknown ({missing})"
    sm = getattr(module, "NVML_CLOCK_SM", 1)
    highest, no_highest = nvml.nvml_query(module, "nvmlDeviceGetMaxClockInfo", handle, sm)
    application, no_application = nvml.nvml_query(
        module, "nvmlDeviceGetApplicationsClock", handle, sm
    )
    persistence, no_persistence = nvml.nvml_query(module, "nvmlDeviceGetPersistenceMode", handle)
    parts = [
        f"SM at most {no_highest or f'{highest} MHz'}",
        f"application clock {no_application or f'{application} MHz'}",
        f"persistence {no_persistence or ('on' if persistence else 'off')}",
    ]
    return ", ".join(parts)


class TargetLike(Protocol):
    """A matrix's `target:` section."""

    @property
    def gpu(self) -> str: ...
    @property
    def count(self) -> int: ...
    @property
    def on_mismatch(self) -> str: ...
    @property
    def is_cpu(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class TargetFit:
    """``skip``: the matrix asks to measure nothing on this machine; ``warning`` says what differs
    or cannot be known. ``others``: the further cards of a target's ``count``. ``held``: who
    measures holds the locks of all cards already.
    """

    device: str  # 'cpu' or 'cuda'
    gpu: GpuHandle | None
    warning: str = ""
    skip: bool = False
    others: tuple[GpuHandle, ...] = ()
    held: bool = False

    @property
    def gpus(self) -> tuple[GpuHandle, ...]:
        """All cards of the target; none on a CPU."""
        return () if self.gpu is None else (self.gpu, *self.others)


def check_target(
    target: TargetLike, *, module: Any | None = None, environ: Mapping[str, str] | None = None
) -> TargetFit:
    """Compare the machine with the matrix's target.

    ENVIRONMENT where it differs and `on_mismatch` is refuse, and under `warn` too where there is no
    GPU at all: nothing could be measured.
    """
    if target.is_cpu:
        return TargetFit("cpu", None)
    gpus, reason = visible_gpus(module=module, environ=environ)
    wanted = f"{target.count} x {target.gpu}" if target.count > 1 else target.gpu
    if not gpus:
        problem = f"got no GPU ({reason}), and the matrix wants {wanted}"
    elif not all(matches(target.gpu, gpu.name) for gpu in gpus[: target.count]):
        problem = (
            f"got {', '.join(gpu.name for gpu in gpus[: target.count])}, and the matrix wants"
            f" {wanted}"
        )
    elif len(gpus) < target.count:
        problem = f"got {len(gpus)} x {gpus[0].name}, and the matrix wants {wanted}"
    else:
        others = tuple(gpus[1 : target.count])
        return TargetFit("cuda", gpus[0], blindness(gpus[0], module), others=others)
    if target.on_mismatch == "skip":
        return TargetFit(
            "cuda",
            gpus[0] if gpus else None,
            f"nothing measured: {problem} (on_mismatch: skip)",
            skip=True,
        )
    if target.on_mismatch == "warn" and gpus:
        warnings = [f"{problem} (on_mismatch: warn)", blindness(gpus[0], module)]
        others = tuple(gpus[1 : target.count])
        return TargetFit("cuda", gpus[0], "; ".join(filter(None, warnings)), others=others)
    raise PerfbenchError(
        Exit.ENVIRONMENT,
        f"{problem}. Next: run it on that card, choose a GPU with CUDA_VISIBLE_DEVICES, or take"
        " another matrix",
    )
