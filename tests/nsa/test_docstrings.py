"""The docstring of every public name is its contract: equation, shapes, dtypes, errors, and each
argument by its name.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping

import pytest

import nsa

EQUATION, ERRORS = r"Eq\. \d|section 3", r"(?s)ValueError|RouteError"
SHAPES, DTYPE = r"\[B, [A-Z]", r"dtype|int32|int64|fp32"
# What must be found in the docstring, or in those of the class and its public methods together.
CONTRACTS: Mapping[str, tuple[str, ...]] = {
    "ChunkGraph": (
        r"int64 \[B, tokens\]",
        r"\[B, tokens,? vocab_size\]",
        DTYPE,
        "ValueError",
    ),
    "DecodeGraph": (
        EQUATION,
        r"int64 \[B, 1\]",
        r"\[B, vocab_size\]",
        DTYPE,
        ERRORS,
        "RouteError",
        "engagement",
    ),
    "ModelConfig": (ERRORS,),
    "NSAAttention": (EQUATION, SHAPES, DTYPE, ERRORS, "RouteError", "no_grad|gradient"),
    "NSACache": (SHAPES, DTYPE, ERRORS, "max_len"),
    "NSAConfig": ("arXiv 2502.11089", DTYPE, ERRORS),
    "RouteError": ("ValueError", "reason"),
    "TinyLM": (EQUATION, SHAPES, r"int64 \[B, T\]", DTYPE, ERRORS, "RouteError"),
    "compress": (r"Eq\. 7", SHAPES, DTYPE, ERRORS),
    "compressed_attention": (
        r"Eq\. 2",
        r"Eq\. 7",
        SHAPES,
        r"lse \[B, T, HQ\]",
        "fp32",
        ERRORS,
        "RouteError",
    ),
    "nsa_attention": (r"Eq\. 5", SHAPES, DTYPE, "ValueError", "RouteError"),
    "select_blocks": (r"Eq\. 8", SHAPES, "int32", "fp32", ERRORS),
    "selected_attention": (
        r"Eq\. 2",
        r"Eq\. 12",
        "int32",
        SHAPES,
        "NSA_STRICT_ASSERTS",
        "ValueError",
        "RouteError",
    ),
    "sliding_attention": (r"Eq\. 2", SHAPES, DTYPE, "ValueError", "RouteError"),
}
COMMON = ("q", "k", "v", "scale", "q_start")  # explained once, at the head of nsa.functional


def public_parts(thing: object) -> dict[str, object]:
    """The thing, and of a class its own public methods and properties."""
    own = vars(thing).items() if inspect.isclass(thing) else ()
    parts = {
        name: getattr(part, "__func__", part) for name, part in own if not name.startswith("_")
    }
    return {"": thing} | {
        n: p for n, p in parts.items() if inspect.isfunction(p) or isinstance(p, property)
    }


def docstring_of(thing: object) -> str:
    """All its docstrings with line breaks as spaces; a dataclass's own, not the signature that
    Python writes in its place.
    """
    texts = [inspect.getdoc(part) or "" for part in public_parts(thing).values()]
    return re.sub(
        r"\s+", " ", " ".join(text for text in texts if not re.match(r"\w+\(.*\) *$", text))
    )


def test_every_public_name_has_a_contract() -> None:
    assert set(CONTRACTS) == set(nsa.__all__)


@pytest.mark.parametrize("name", nsa.__all__)
def test_the_contract_is_in_the_docstring(name: str) -> None:
    text = docstring_of(getattr(nsa, name))
    assert [pattern for pattern in CONTRACTS[name] if not re.search(pattern, text)] == []


@pytest.mark.parametrize("name", nsa.__all__)
def test_every_public_method_says_what_it_does(name: str) -> None:
    mute = [
        part
        for part, thing in public_parts(getattr(nsa, name)).items()
        if not inspect.getdoc(thing)
    ]
    # named for what they are
    assert [part for part in mute if part not in ("value_dim", "rotates_before_compression")] == []


@pytest.mark.parametrize("name", [n for n in nsa.__all__ if inspect.isfunction(getattr(nsa, n))])
def test_every_argument_is_spoken_of(name: str) -> None:
    function = getattr(nsa, name)
    text = docstring_of(function)
    missing = [
        a
        for a in inspect.signature(function).parameters
        if a not in COMMON and not re.search(rf"\b{a}\b", text)
    ]
    assert missing == []
    head = inspect.getdoc(inspect.getmodule(function)) or ""
    assert name == "compress" or all(re.search(rf"\b{word}\b", head) for word in COMMON)


@pytest.mark.parametrize(
    "name",
    [
        n
        for n in nsa.__all__
        if not inspect.isfunction(getattr(nsa, n)) and n.startswith(("NSAA", "Tiny"))
    ],
)
def test_every_argument_of_a_forward_is_spoken_of(name: str) -> None:
    module = getattr(nsa, name)
    arguments = [
        a.split("_")[0] if a.endswith(("_BTM", "_BT")) else a
        for a in inspect.signature(module.forward).parameters
    ]
    # "the rest as in NSAAttention"
    documented = docstring_of(module) + (docstring_of(nsa.NSAAttention) if name == "TinyLM" else "")
    assert [a for a in arguments if a != "self" and not re.search(rf"\b{a}\b", documented)] == []
