"""What the public functions and layers refuse: a ValueError that says got, wanted and the next
step, before anything runs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from nsa import (
    ModelConfig,
    NSAAttention,
    NSACache,
    NSAConfig,
    TinyLM,
    compress,
    compressed_attention,
    engagement,
    functional,
    nsa_attention,
    select_blocks,
    selected_attention,
    sliding_attention,
)
from nsa.model import DenseLM
from nsa.settings import Setting, Settings
from tests.cases import SMALL, randn

TOKENS = 64
LINEAR = replace(SMALL, phi="linear")


def refused(call: Callable[[], object]) -> str:
    """The one-line message of the ValueError that ``call`` raises, having dispatched nothing."""
    with engagement.collect() as ran, pytest.raises(ValueError) as error:
        call()
    message = str(error.value)
    assert not ran.counts, f"ran {ran.counts} before it refused: {message}"
    assert re.fullmatch(r".*\w.*wanted .+; \w.+", message), (
        f"no got, wanted and next step in {message!r}"
    )
    return message


def tensors() -> dict[str, Tensor]:
    """One valid value of each tensor argument, by name."""
    q, k, v = (randn(1, TOKENS, heads, 8, seed=seed) for seed, heads in enumerate((4, 2, 2)))
    return {
        "q": q,
        "k": k,
        "v": v,
        "k_cmp": compress(k, config=SMALL),
        "v_cmp": compress(v, config=SMALL),
        "blocks": torch.zeros(1, TOKENS, 2, 1, dtype=torch.int32),
        "gates": torch.ones(1, TOKENS, 4, 3),
        "q_start": torch.zeros(1, dtype=torch.int64),
        "cu_seqlens": torch.tensor([0, 20, TOKENS]),
        "weight": randn(8, 8 * 8, seed=4),
        "x": randn(1, TOKENS, 32, seed=5),
        "ids": torch.zeros(1, TOKENS, dtype=torch.int64),
    }


def layer(config: NSAConfig = SMALL) -> NSAAttention:
    return NSAAttention(32, 4, 2, 8, config=config)


def small_model() -> ModelConfig:
    return ModelConfig(
        dim=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, vocab_size=16, nsa=SMALL
    )


def attend(a: Mapping[str, Tensor], **options: object) -> Tensor:
    kv = {
        name: (a.get(f"k_{name}", a["k"]), a.get(f"v_{name}", a["v"]))
        for name in ("first", "second", "third")
    }
    return nsa_attention(a["q"], *kv.values(), a["gates"], **{"config": SMALL} | options)  # type: ignore[arg-type]


# Each with the tensors that it takes.
CALLS: Mapping[str, tuple[tuple[str, ...], Callable[[Mapping[str, Tensor]], object]]] = {
    "compress": (
        ("k", "weight"),
        lambda a: compress(a["k"], config=LINEAR, params={"weight": a["weight"]}),
    ),
    "compressed_attention": (
        ("q", "k_cmp", "v_cmp", "q_start"),
        lambda a: compressed_attention(
            a["q"], a["k_cmp"], a["v_cmp"], block=8, stride=4, q_start=a["q_start"]
        ),
    ),
    "select_blocks": (
        ("q", "k_cmp", "q_start"),
        lambda a: select_blocks(
            a["q"], a["k_cmp"], config=SMALL, q_start=a["q_start"], kv_len=TOKENS
        ),
    ),
    "selected_attention": (
        ("q", "k", "v", "blocks", "q_start"),
        lambda a: selected_attention(
            a["q"], a["k"], a["v"], a["blocks"], sel_block=16, q_start=a["q_start"]
        ),
    ),
    "sliding_attention": (
        ("q", "k", "v", "q_start"),
        lambda a: sliding_attention(a["q"], a["k"], a["v"], window=8, q_start=a["q_start"]),
    ),
    "nsa_attention": (
        ("q", "k", "v", "gates", "q_start"),
        lambda a: attend(a, q_start=a["q_start"]),
    ),
    "nsa_attention, second": (("k_second", "v_second"), lambda a: attend(a)),
    "nsa_attention, packed": (
        ("q", "k", "v", "gates", "cu_seqlens"),
        lambda a: attend(a, cu_seqlens=a["cu_seqlens"]),
    ),
    "NSAAttention": (("x",), lambda a: layer()(a["x"])),
    "NSAAttention, packed": (
        ("x", "cu_seqlens"),
        lambda a: layer()(a["x"], cu_seqlens=a["cu_seqlens"]),
    ),
    "TinyLM": (("ids",), lambda a: TinyLM(small_model())(a["ids"])),
    "TinyLM.generate": (
        ("ids",),
        lambda a: TinyLM(small_model()).generate(a["ids"], max_new_tokens=1),
    ),
    "DenseLM": (("ids",), lambda a: DenseLM(small_model())(a["ids"])),
}
SPOILS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "on another device": lambda x: x.to("meta"),
    "double": lambda x: x.double(),
    "integer": lambda x: x.to(torch.int16),
    "one dimension less": lambda x: x[0],
    "one dimension more": lambda x: x[None],
    "one too many at the end": lambda x: torch.cat([x, x[..., -1:]], -1),
}
# Where that is no fault: a wider gate or phi is cast, any document may follow, one block more may
# be chosen, one token more be read.
ALLOWED = {
    ("gates", "double"),
    ("weight", "double"),
    ("v", "one too many at the end"),
    ("v_cmp", "one too many at the end"),
}
ALLOWED |= {
    ("blocks", "one too many at the end"),
    ("ids", "one too many at the end"),
    ("cu_seqlens", "one too many at the end"),
}
# With a second tensor to disagree with; alone, a tensor may be of any floating dtype and device.
ALONE = {("k", "double")}


def spoilt() -> list[tuple[str, str, str]]:
    names = [
        (call, name, spoil)
        for call, (arguments, _) in CALLS.items()
        for name in arguments
        for spoil in SPOILS
    ]
    return [
        (c, n, s)
        for c, n, s in names
        if (n, s) not in ALLOWED and not (c == "compress" and (n, s) in ALONE)
    ]


@pytest.mark.parametrize("call", CALLS)
def test_the_calls_are_valid_before_they_are_spoilt(call: str) -> None:
    with torch.no_grad():
        CALLS[call][1](tensors())


@pytest.mark.parametrize(("call", "name", "spoil"), spoilt())
def test_a_tensor_that_does_not_fit_is_refused_before_anything_runs(
    call: str, name: str, spoil: str
) -> None:
    arguments = tensors()
    arguments[name] = SPOILS[spoil](arguments[name.split("_second")[0]])
    with torch.no_grad():
        refused(lambda: CALLS[call][1](arguments))


@pytest.mark.parametrize("path", ["auto", "reference", "v1", "v2", "masked"])
def test_values_without_a_dimension_are_refused_on_every_path(path: str) -> None:
    """v1 raised PyTorch's "cannot reshape tensor of 0 elements", the others returned [.., 0]."""
    a = tensors()
    a["v"] = a["v"][..., :0]
    with pytest.raises(ValueError, match=r"v has shape \(1, \d+, 2, 0\); wanted a head dim >= 1"):
        attend(a, path=path)
    with pytest.raises(ValueError, match="wanted a head dim >= 1"):
        selected_attention(a["q"], a["k"], a["v"], a["blocks"], sel_block=16, path=path)


@pytest.mark.parametrize("value", [0, -1, 8.5, True, "8"])
def test_sizes_are_whole_numbers(value: object) -> None:
    a = tensors()
    size: int = value  # type: ignore[assignment]
    calls: list[tuple[str, Callable[[], object]]] = [
        ("window", lambda: sliding_attention(a["q"], a["k"], a["v"], window=size)),
        (
            "sel_block",
            lambda: selected_attention(a["q"], a["k"], a["v"], a["blocks"], sel_block=size),
        ),
        (
            "block",
            lambda: compressed_attention(a["q"], a["k_cmp"], a["v_cmp"], block=size, stride=4),
        ),
        (
            "stride",
            lambda: compressed_attention(a["q"], a["k_cmp"], a["v_cmp"], block=8, stride=size),
        ),
    ]
    for name, call in calls:
        assert f"{name}={value!r}" in refused(call)


def test_a_stride_that_does_not_divide_the_block_is_refused() -> None:
    a = tensors()
    assert "block=5, stride=3" in refused(
        lambda: compressed_attention(a["q"], a["k"], a["v"], block=5, stride=3)
    )


@pytest.mark.parametrize(
    ("positions", "words"), [([-3, 0], "holds -3 .. 0"), ([0, 31], "holds 0 .. 31")]
)
def test_positions_before_the_sequence_or_behind_its_last_key_are_refused(
    positions: list[int], words: str
) -> None:
    """34 queries over 64 keys: the last row that they fit begins at 30."""
    q, k, v = (randn(2, n, heads, 8, seed=0) for n, heads in ((34, 4), (64, 2), (64, 2)))
    start, fits = (torch.tensor(p) for p in (positions, [0, 30]))
    blocks = torch.zeros(2, 34, 2, 1, dtype=torch.int32)
    calls: list[Callable[[Tensor], Tensor]] = [
        lambda q_start: sliding_attention(q, k, v, window=8, q_start=q_start),
        lambda q_start: selected_attention(q, k, v, blocks, sel_block=16, q_start=q_start),
        lambda q_start: nsa_attention(
            q, *3 * [(k, v)], torch.ones(2, 34, 4, 3), config=SMALL, q_start=q_start
        ),
    ]
    for call in calls:
        assert call(fits).shape == (2, 34, 4, 8)
        assert words in refused(lambda call=call: call(start))  # type: ignore[misc]


# The contents of blocks: looked at in strict mode alone.


def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        functional.settings,
        "current",
        lambda: Settings(strict_asserts=Setting(True, "environment")),
    )


# Query 40 of the first row stands in block 2 of four.
FAULTS = {
    "out of range": ([0, 4, -1], [-2, 0, 1]),
    "in the future": ([0, 1, 3], [3, -1, -1]),
    "repeated": ([0, 0, 1], [1, 2, 2]),
    "out of order": ([1, 0, 2], [2, 1, -1], [0, -1, 1], [-1, 0, -1]),
}


@pytest.mark.parametrize(
    ("fault", "row"), [(fault, row) for fault, rows in FAULTS.items() for row in rows]
)
@pytest.mark.parametrize("ragged", [False, True])
def test_strict_mode_names_what_is_wrong_with_a_row_of_blocks(
    fault: str, row: list[int], ragged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    strict(monkeypatch)
    k, v = randn(2, 64, 2, 8, seed=1), randn(2, 64, 2, 8, seed=2)
    q = randn(2, 4, 4, 8, seed=0)
    start = torch.tensor([38, 60]) if ragged else 38
    blocks = torch.tensor([0, -1, -1], dtype=torch.int32).repeat(2, 4, 2, 1)
    selected_attention(q, k, v, blocks, sel_block=16, q_start=start)  # is fine
    blocks[0, 2, 1] = torch.tensor(row, dtype=torch.int32)
    message = refused(lambda: selected_attention(q, k, v, blocks, sel_block=16, q_start=start))
    assert (
        f"blocks[0, 2, 1] is {row}, with an id {fault}; wanted distinct ids within 0 .. 2,"
        in message
    )


def test_the_last_row_may_see_what_is_the_first_ones_future(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each row goes by its own position, and a block is there from its first token on."""
    strict(monkeypatch)
    k, v, q = randn(2, 64, 2, 8, seed=1), randn(2, 64, 2, 8, seed=2), randn(2, 1, 4, 8, seed=0)
    blocks = torch.tensor([0, 3], dtype=torch.int32).repeat(2, 1, 2, 1)
    blocks[0, ..., 1] = -1
    selected_attention(q, k, v, blocks, sel_block=16, q_start=torch.tensor([47, 48]))
    blocks[0, ..., 1] = 3
    assert "blocks[0, 0, 0] is [0, 3], with an id in the future" in refused(
        lambda: selected_attention(q, k, v, blocks, sel_block=16, q_start=torch.tensor([47, 48]))
    )


@pytest.mark.parametrize("selection", ["exact", "hierarchical"])
def test_strict_mode_lets_through_what_selection_chooses(
    selection: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole, packed (aligned rows are positions, too), and decoded from rows of different
    lengths.
    """
    want_from = layer(replace(SMALL, selection=selection))
    x = randn(2, 200, 32, seed=3)
    with torch.no_grad():
        whole = want_from(x)
        strict(monkeypatch)
        assert torch.equal(want_from(x), whole)
        want_from(x[:1], cu_seqlens=torch.tensor([0, 77, 77, 78, 190]))
        cache = want_from.new_cache(2, 200)
        want_from(x[:, :150], cache=cache, num_tokens=[150, 97])
        want_from(x[:, :3], cache=cache)


# Caches.


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"window": 7}, "{'window': 7}.*{'window': 24}"),
        ({"cmp_block": 4}, "'cmp_block': 4"),
        ({"phi": "mlp"}, "'phi': 'mlp'"),
    ],
    ids=["window", "cmp_block", "phi"],
)
def test_a_cache_of_another_config_is_refused(changes: dict[str, object], words: str) -> None:
    """It was taken, and the output was wrong by 0.17."""
    other = NSACache.empty(replace(SMALL, **changes), 1, 64, num_kv_heads=2, head_dim=8)  # type: ignore[arg-type]
    same = NSACache.empty(replace(SMALL), 1, 64, num_kv_heads=2, head_dim=8)
    module, model, ids = layer(), TinyLM(small_model()), torch.zeros(1, 3, dtype=torch.int64)
    with torch.no_grad():
        assert module(randn(1, 3, 32, seed=0), cache=same).shape == (1, 3, 32)
        for call in (
            lambda: module(randn(1, 3, 32, seed=0), cache=other),
            lambda: model(ids, cache=[model.new_cache(1, 64)[0], other]),
        ):
            assert re.search(words, refused(call))
    assert other.lengths == (0,)


@pytest.mark.parametrize("wrong", [True, 3, "cache", [1, 2], SMALL], ids=str)
def test_what_is_no_cache_is_refused(wrong: object) -> None:
    module, model, ids = layer(), TinyLM(small_model()), torch.zeros(1, 3, dtype=torch.int64)
    with torch.no_grad():
        assert f"type {type(wrong).__name__}" in refused(
            lambda: module(randn(1, 3, 32, seed=0), cache=wrong)
        )  # type: ignore[arg-type]
        refused(lambda: model(ids, cache=wrong))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"v_head_dim": 4}, "cache's v holds heads (2, 4)"),
        ({"head_dim": 4, "v_head_dim": 8}, "cache's k holds heads (2, 4)"),
        ({"num_kv_heads": 1}, "cache's k holds heads (1, 8)"),
        ({"dtype": torch.float64}, "cache's k is torch.float64"),
        ({"device": "meta"}, "on meta"),
        ({"batch": 2}, "holds 2 rows"),
    ],
    ids=str,
)
def test_a_cache_that_does_not_fit_the_chunk_is_refused_and_stays_empty(
    changes: dict[str, object], words: str
) -> None:
    shape: dict[str, object] = {
        "batch": 1,
        "max_len": 64,
        "num_kv_heads": 2,
        "head_dim": 8,
    } | changes
    cache, module = NSACache.empty(SMALL, **shape), layer()  # type: ignore[arg-type]
    with torch.no_grad():
        assert words in refused(lambda: module(randn(1, 3, 32, seed=0), cache=cache))
    assert set(cache.lengths) == {0}


@pytest.mark.parametrize("branch", range(3))
@pytest.mark.parametrize("part", ["k", "v"])
@pytest.mark.parametrize("spoil", ["double", "one too many at the end", "on another device"])
def test_every_k_and_v_of_a_chunk_is_looked_at(branch: int, part: str, spoil: str) -> None:
    cache = NSACache.empty(SMALL, 1, 64, num_kv_heads=2, head_dim=8)
    pairs = [[randn(1, 3, 2, 8, seed=0), randn(1, 3, 2, 8, seed=1)] for _ in range(3)]
    pairs[branch]["kv".index(part)] = SPOILS[spoil](pairs[branch]["kv".index(part)])
    kv_cmp, kv_sel, kv_win = ((k, v) for k, v in pairs)
    message = refused(
        lambda: cache.append(
            kv_cmp, kv_sel, kv_win, compress=lambda k, v, first: (k[:, :0], v[:, :0])
        )
    )
    assert f"cache's {part}" in message and ("cmp", "sel", "win")[branch] in message
    assert cache.lengths == (0,) and not any(
        x.any() for x in (*cache.sel, *cache.win, *cache.cmp, *cache.tail)
    )


# Layers and models.


@pytest.mark.parametrize(("value", "words"), [(16, "holds 0 .. 16"), (-1, "holds -1 .. 0")])
def test_ids_outside_the_vocabulary_are_refused(value: int, words: str) -> None:
    ids = torch.zeros(1, 8, dtype=torch.int64)
    ids[0, 5] = value
    tiny, dense = TinyLM(small_model()), DenseLM(small_model())
    for call in (
        lambda: tiny(ids),
        lambda: dense(ids),
        lambda: tiny.generate(ids, max_new_tokens=2),
    ):
        message = refused(call)
        assert words in message and "wanted 0 .. 15" in message


def test_what_pads_a_prompt_is_no_id() -> None:
    model, ids = TinyLM(small_model()), torch.tensor([[3, 4, -1], [5, 6, 7]])
    out = model.generate(ids, max_new_tokens=2, prompt_lengths=[2, 3])
    assert torch.equal(
        out, model.generate(ids.clamp(min=0), max_new_tokens=2, prompt_lengths=[2, 3])
    )
    refused(lambda: model.generate(ids, max_new_tokens=2, prompt_lengths=[3, 3]))


def test_what_cannot_be_read_is_not_read() -> None:
    """A model without contents gives logits without contents, in strict mode, too."""
    with torch.device("meta"):
        model, ids = (
            TinyLM(small_model(), path="masked", fa2="off"),
            torch.zeros(1, 8, dtype=torch.int64),
        )
    assert model(ids).shape == (1, 8, 16)


def test_tensors_that_only_look_like_a_cpus_are_not_read() -> None:
    with FakeTensorMode():
        model, ids = (
            TinyLM(small_model(), path="masked", fa2="off"),
            torch.zeros(1, 20, dtype=torch.int64),
        )
        assert model(ids).shape == (1, 20, 16)
        assert layer()(
            torch.zeros(1, 20, 32), cu_seqlens=torch.zeros(3, dtype=torch.int64)
        ).shape == (1, 20, 32)
        q, kv = torch.zeros(2, 4, 4, 8), torch.zeros(2, 20, 2, 8)
        assert sliding_attention(
            q, kv, kv, window=8, q_start=torch.zeros(2, dtype=torch.int64)
        ).shape == (2, 4, 4, 8)


def test_autocast_casts_what_is_not_the_weights_dtype() -> None:
    module, x = layer(), randn(1, 20, 32, seed=0)
    refused(lambda: module(x.bfloat16()))
    with torch.autocast("cpu", torch.bfloat16):
        assert module(x.bfloat16()).isfinite().all()


@pytest.mark.parametrize(
    "shape", [(64, 32), (1, 64, 31), (1, 0, 32), (0, 0, 32), (1, 1, 64, 32)], ids=str
)
def test_states_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    assert str(shape) in refused(lambda: layer()(torch.zeros(shape)))


def whole(**changed: object) -> Tensor:
    x = tensors()
    pair = (x["k"], x["v"])
    given = {
        "q": x["q"],
        "kv_cmp": pair,
        "kv_sel": pair,
        "kv_win": pair,
        "gates": x["gates"],
        "config": SMALL,
        **changed,
    }
    return nsa_attention(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"scale": float("nan")}, "scale=nan; wanted a finite number"),
        ({"scale": float("inf")}, "scale=inf; wanted a finite number"),
        ({"scale": "0.1"}, "scale='0.1'; wanted a finite number"),
        (
            {"kv_sel": torch.zeros(1, TOKENS, 2, 8)},
            r"kv_sel is a tensor \(1, 64, 2, 8\); wanted the pair",
        ),
        ({"kv_win": None}, "kv_win is NoneType; wanted the pair"),
        ({"config": None}, "config is NoneType; wanted an NSAConfig"),
        ({"cu_seqlens": [0, 1.5]}, r"cu_seqlens=\[0, 1.5\]; wanted whole numbers"),
        (
            {"q": torch.zeros(1, TOKENS, 4, 8, dtype=torch.int64)},
            "q is torch.int64; wanted one floating dtype",
        ),
    ],
    ids=str,
)
def test_arguments_of_another_kind(changed: dict[str, object], words: str) -> None:
    assert re.search(words, refused(lambda: whole(**changed)))


@pytest.mark.parametrize("config", [None, {"window": 24}])
def test_select_blocks_wants_a_config(config: object) -> None:
    x = tensors()
    assert "wanted an NSAConfig" in refused(
        lambda: select_blocks(x["q"], x["k_cmp"], config=config)
    )  # type: ignore[arg-type]


def test_keys_that_end_before_the_queries() -> None:
    x = tensors()
    assert "kv_len=10; wanted at least 64" in refused(
        lambda: select_blocks(x["q"], x["k_cmp"], config=SMALL, kv_len=10)
    )
    assert "kv_len=70; wanted at least 72" in refused(
        lambda: select_blocks(x["q"], x["k_cmp"], config=SMALL, kv_len=70, q_start=8)
    )


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ((0, 8), "batch=0"),
        ((1, "8"), "max_len='8'"),
        ((True, 8), "batch=True"),
        ((1, 0), "max_len=0"),
    ],
)
def test_sizes_of_a_cache(sizes: tuple[int, int], words: str) -> None:
    message = refused(lambda: NSACache.empty(SMALL, *sizes, num_kv_heads=2, head_dim=8))
    assert f"NSACache {words}; wanted a whole number of at least 1; give the " in message
    assert ("number of sequences" in message) == words.startswith("batch")
