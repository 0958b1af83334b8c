"""Launch plans: a call of an operator that is like an earlier one repeats the launches of that one,
without the Python that decided on them.

An operator's body makes memory, takes views and launches kernels. What it decides on is in a plan's
key: of each tensor its shape, strides and dtype, whether its address is a multiple of 16 and which
tensors are at one address, every number, the current device, and how many shares the call is one
of. A setting of the environment, or an attribute of a module of nsa that is set anew (a table of
tiles, say), forgets every plan.

The second call of a key is recorded (`call_recorder`), and made into a plan where it did nothing
that has to run in every call. What wants to see calls or launches gets the body: a mode, a hook,
deterministic algorithms, which fill memory.
"""

from __future__ import annotations

import marshal
import sys
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from nsa import settings
from nsa.ops.kernels import launch as door
from nsa.ops.kernels.call_recorder import CallRecorder, Refused
from nsa.ops.kernels.launch_plan import LaunchPlan, plan_of
from nsa.ops.kernels.shares import number_of_shares

# False: every call runs the operator's body; for measurements and tests.
enabled = True
MOST_PLANS = 64  # of an operator; a plan is 5 to 64 KB, and its tensor maps .5 KB each
MOST_SEEN = 1024  # keys of an operator that were seen once: each decoded token may bring a new one
MOST_TRIES = 4  # recordings of a call whose kernels are not all compiled yet

_TENSORS = {Tensor, Parameter}
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_is_deterministic = torch._C._get_deterministic_algorithms
_data_ptr, _get_device, _stride = Tensor.data_ptr, Tensor.get_device, Tensor.stride
_shape: Callable[[Tensor], Any] = Tensor.shape.__get__  # type: ignore[attr-defined]
_dtype: Callable[[Tensor], Any] = Tensor.dtype.__get__  # type: ignore[attr-defined]


class Plans:
    """The plans of one operator, whose body ``run`` only makes memory and launches kernels, by
    `nsa.ops.kernels.launch`.
    """

    def __init__(self, run: Callable[..., Any]) -> None:
        self.run = run
        self.plans: dict[Hashable, LaunchPlan | str] = {}  # or why there is none
        self.seen: dict[Hashable, int] = {}  # how often, of keys without one
        _ALL.append(self)

    def call(self, inputs: Sequence[Any]) -> Any:
        """`run` of ``inputs``, by a plan where there is one; the first tensor is on a GPU."""
        if not _allowed():
            return self.run(*inputs)
        tensors: list[Tensor] = []
        others: list[Any] = []  # with ... for a tensor, and a list's length before what it holds
        for x in inputs:
            if type(x) in _TENSORS:
                tensors.append(x)
                others.append(...)
            elif type(x) is list:
                others.append(len(x))
                for one in x:
                    if type(one) in _TENSORS:
                        tensors.append(one)
                        others.append(...)
                    else:
                        others.append(one)
            else:
                others.append(x)
        try:
            numbers = marshal.dumps(others, 2)  # bytes tell 1 from 1.0, and 0.0 from -0.0
        except ValueError:  # such as a tensor of another class
            return self.run(*inputs)
        active = driver.active
        device = active.get_current_device()
        if [*map(_get_device, tensors)].count(device) < len(tensors):
            return self.run(*inputs)
        addresses = tuple(map(_data_ptr, tensors))
        key = (
            numbers,
            device,
            number_of_shares(),
            reduce(or_, addresses) % 16 == 0 or tuple([address % 16 for address in addresses]),
            # which are one
            len({*addresses}) == len(addresses) or tuple(map(addresses.index, addresses)),
            *map(_shape, tensors),
            *map(_stride, tensors),
            *map(_dtype, tensors),
        )
        plan = self.plans.get(key)
        if plan is None:
            return self._without_plan(key, inputs, tensors)
        if isinstance(plan, str) or not plan.holds():
            return self.run(*inputs)
        return plan.repeat(addresses, active.get_current_stream(device))

    def _without_plan(self, key: Hashable, inputs: Sequence[Any], tensors: list[Tensor]) -> Any:
        """`run`, recorded where ``key`` was seen before."""
        if len(self.seen) >= MOST_SEEN:
            self.seen.clear()
        tries = self.seen[key] = self.seen.get(key, -1) + 1
        if not tries or door.RECORDED.note is not None:
            return self.run(*inputs)
        version = _STATE.version
        recorder = CallRecorder(tensors)
        door.RECORDED.note = recorder.launched
        try:
            with recorder:
                result = self.run(*inputs)
        finally:
            door.RECORDED.note = None
        try:
            _check_launchers()
            plan: LaunchPlan | str = plan_of(recorder, result, tensors[0].device)
        except Refused as why:
            if why.passes and tries < MOST_TRIES:
                return result
            plan = str(why)
        with _STORING:
            _watch()
            if version == _STATE.version:
                if len(self.plans) >= MOST_PLANS:
                    self.plans.pop(next(iter(self.plans)))
                self.plans[key] = plan
                self.seen.pop(key, None)
        return result


@dataclass(slots=True)
class _State:
    """``version``: how often plans were forgotten. Whether ``settings`` allow them."""

    version: int = 0
    settings: settings.Settings | None = None
    allowed: bool = True


_ALL: list[Plans] = []
_STATE = _State()
_STORING = threading.RLock()  # of plans: autograd has threads of its own


def _allowed() -> bool:
    """Whether nothing wants to see what a call does, and settings are those of all plans."""
    now = settings.current()
    if _STATE.settings is not now:
        forget()
        _STATE.settings, _STATE.allowed = now, now.launch_plans.value is not False
    return (
        enabled
        and _STATE.allowed
        and door.goes_straight(JITFunction)
        and not (_dispatch_modes() or _function_modes() or _is_deterministic())
    )


def forget() -> None:
    """Drop every plan: what is decided on besides a call's inputs has changed. For whoever changes
    a table in place or an attribute of a class, which nothing here sees.
    """
    with _STORING:
        _STATE.version += 1
        for one in _ALL:
            one.plans.clear()
            one.seen.clear()


class _Watched(ModuleType):
    """A module whose attributes, among them tables of tiles, decide on plans."""

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        forget()

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        forget()


def _modules() -> list[ModuleType]:
    """Those that operators run, but for this one and `launch`, whose switches each call reads."""
    found = [*sys.modules.items()]  # another thread may import
    return [
        module
        for name, module in found
        if name.startswith(("nsa.ops", "nsa.routing"))
        and name not in (__name__, door.__name__)
        and isinstance(module, ModuleType)
    ]


def _check_launchers() -> None:
    """Refused where a module launches by another function than `launch`: a test's, say."""
    if any(vars(m).get("launch", door) not in (door, door.launch) for m in _modules()):
        raise Refused("another function stands for `launch`")


def _watch() -> None:
    for module in _modules():
        if type(module) is ModuleType:
            module.__class__ = _Watched
