"""Context parallelism over gloo on 4 and 2 processes, started once, against one process; and where
the tokens lie.
"""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from nsa.documents import Packing
from nsa.ops import flash
from nsa.ops.interval import sliding
from nsa.parallel.gather import WantedItems, by_rank, ordered_sum
from nsa.parallel.words import copy_words
from nsa.parallel.zigzag import Zigzag
from tests.cases import error, randn
from tests.nsa.parallel.four_ranks import CASES, MODELS
from tests.nsa.torchrun import found_by_ranks

SCRIPT = Path(__file__).with_name("four_ranks.py")
RANKS = pytest.mark.parametrize("ranks", [4, 2])


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("ranks") / "found.json"
    loaded: dict[str, Any] = found_by_ranks(SCRIPT, 4, out)
    return loaded


def worst(errors: dict[str, float]) -> tuple[float, str]:
    return max((error, name) for name, error in errors.items())


@RANKS
@pytest.mark.parametrize("case", CASES)
def test_a_layer_is_that_of_one_process(found: dict[str, Any], case: str, ranks: int) -> None:
    """Outputs, gradients of the input and of every parameter, and the blocks, in fp64."""
    assert worst(found[f"{case}, {ranks} ranks"])[0] <= 1e-13


@RANKS
@pytest.mark.parametrize("model", MODELS)
def test_a_model_has_the_loss_and_the_gradients_of_one_process(
    found: dict[str, Any], model: str, ranks: int
) -> None:
    assert worst(found[f"{model}, {ranks} ranks"])[0] <= 1e-13


@RANKS
def test_a_layer_equals_the_oracle(found: dict[str, Any], ranks: int) -> None:
    """fp32 against fp64, with the bounds that tests/nsa/test_layer.py has for one process."""
    errors = found[f"oracle, {ranks} ranks"]
    assert errors.pop("y") <= 1e-5
    assert worst(errors)[0] <= 2e-5


@RANKS
@pytest.mark.parametrize("phi", ["mean", "linear", "mlp"])
def test_equal_q_and_k_give_the_same_bits(found: dict[str, Any], phi: str, ranks: int) -> None:
    assert found[f"bits, {phi}, {ranks} ranks"] == {"compressed": True, "blocks": True}
    packed = found[f"bits of documents, {phi}, {ranks} ranks"]
    assert packed["blocks"]
    assert packed["compressed"] or phi == "mlp"  # a product of other rows may round another way


def test_a_nan_stays_in_its_document(found: dict[str, Any]) -> None:
    """On the ranks of the document, as on one process."""
    assert found["isolated"] == {"some": True, "same": True, "rest": True}


def test_bf16_is_within_its_bound(found: dict[str, Any]) -> None:
    """NSA.md: twice the error of one process, and 2^-8 of the largest true value."""
    assert worst(found["bf16"])[0] <= 2.0**-8


def test_two_runs_are_bitwise_equal(found: dict[str, Any]) -> None:
    assert found["repeated"] is True


@pytest.mark.parametrize(
    "what, words",
    [
        ("mesh", 'mesh of 2 dimensions.*wanted one; pass mesh\\["NAME"\\]'),
        ("none", "got NoneType; wanted a DeviceMesh of one dimension; .*init_device_mesh"),
        ("list", "got list; wanted a tensor .*; give torch.as_tensor"),
        ("gathered list", "got list; wanted a tensor .*; give torch.as_tensor"),
        ("dim", "got dim=2 .*\\(1, 128\\); wanted a whole number from -2 to 1, .*; name it"),
        ("word", "got dim='tokens' .*; wanted a whole number from -2 to 1"),
        ("gathered dim", "got dim=-3 .*; wanted a whole number from -2 to 1"),
        ("odd", "got 7 tokens of a rank, wanted a whole number of two chunks.*; give 6 or 8"),
        ("seven", "got 7 tokens of a rank, wanted a whole number of two chunks.*; give 6 or 8"),
        ("half", "got 8.0 tokens of a rank, wanted a whole number of two chunks"),
        ("twice", "ShardedAttention; wanted NSAAttention or DenseAttention alone, not wrapped yet"),
        ("other", "Linear with no attention of nsa; wanted NSAAttention or DenseAttention"),
        ("cudnn", "kind='dense_cudnn'.*wanted dense or dense_flash; set kind"),
        ("chunk", "got 24 tokens a rank.*sel_block=16 tokens.*pad the sequence to 128 tokens"),
        ("documents", "cu_seqlens \\[0, 129\\] .. 129 over 128 tokens; wanted 0 first, ascending"),
        ("masked", "got num_tokens with context parallelism; wanted whole sequences"),
    ],
)
def test_what_is_not_served_says_so(found: dict[str, Any], what: str, words: str) -> None:
    assert re.search(words, found["refused"][what])


def test_ranks_hold_an_early_and_a_late_chunk() -> None:
    x = torch.arange(12)[None]
    shards = [Zigzag(rank, 3).shard(x, 1) for rank in range(3)]
    assert torch.cat(shards).tolist() == [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]
    for rank, shard in enumerate(shards):
        assert torch.equal(Zigzag(rank, 3).positions(4, x.device), shard[0])
    stacked = torch.stack(shards)
    wanted, received = WantedItems(((0, 12),)), stacked.view(3, 1, 2, 2)
    room = wanted.room(stacked, received.shape[1:], 3)
    wanted.lay_out(received, room)
    assert torch.equal(room, x)
    assert torch.equal(by_rank(x, 3), stacked)


def test_a_length_that_does_not_divide_is_named() -> None:
    with pytest.raises(ValueError, match="got 13 tokens.*a multiple of 6 for 3 ranks.*to 12"):
        Zigzag(0, 3).shard(torch.arange(13), 0)


def test_parts_are_added_up_in_rank_order_in_fp32() -> None:
    """In bf16, 1 + 2^-9 is 1; in fp32 from the other end, 2^-25 twice would move 1."""
    small = torch.tensor([1.0, 2.0**-9, 2.0**-9, 2.0**-9, 2.0**-9]).bfloat16()
    assert float(ordered_sum(small, torch.float32)) == 1 + 2.0**-7
    tiny = torch.tensor([1.0, 2.0**-24, 2.0**-24])
    assert float(ordered_sum(tiny, torch.float32)) == 1.0
    assert float(ordered_sum(tiny.flip(0), torch.float32)) > 1.0


def test_fa2_is_given_the_documents_of_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sequences of queries are the last of their keys: as SDPA over the same chunk, whose
    window reaches keys of two documents, and neither rows before nor behind it.
    """

    def varlen(_: str, q: Tensor, k: Tensor, v: Tensor, *cu: Any, **options: Any) -> Tensor:
        size = options["window"][0] + 1
        of_q, of_k = (x.tolist() for x in cu[:2])
        assert of_q[-1] == cu[2] == q.shape[0] and of_k[-1] == cu[3] == k.shape[0]
        found = []
        for (q0, q1), (k0, k1) in zip(pairwise(of_q), pairwise(of_k), strict=True):
            key, row = torch.arange(k1 - k0), torch.arange(q1 - q0)[:, None] + (k1 - k0 - q1 + q0)
            keep = (key <= row) & (key > row - size)
            one = (x.transpose(0, 1) for x in (q[q0:q1], k[k0:k1], v[k0:k1]))
            found.append(scaled_dot_product_attention(*one, attn_mask=keep).transpose(0, 1))
        return torch.cat(found)

    packing = Packing.of(torch.tensor([0, 5, 5, 40, 41, 64]), 64, 16)
    documents = packing.part((9, 50), (20, 93)).documents.counted_from(16)
    q, k, v = randn(1, 73, 2, 8, seed=1), randn(1, 77, 2, 8, seed=2), randn(1, 77, 2, 8, seed=3)
    options: dict[str, Any] = {"window": 12, "q_start": 4, "scale": 8**-0.5}
    want = sliding.attend(q, k, v, fa2=None, documents=documents, **options)
    monkeypatch.setattr(flash, "varlen", varlen)
    got = sliding.attend(q, k, v, fa2="torch", documents=documents, **options)
    assert error(got, want) <= 1e-6


@pytest.mark.parametrize("heads", [slice(2, 4), slice(0, 3, 2)])
@pytest.mark.parametrize(
    "dim, part", [(8, slice(8)), (8, slice(2, 6)), (6, slice(4)), (8, slice(0, 8, 2))]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_copies_by_words_are_copies(
    dtype: torch.dtype, dim: int, part: slice, heads: slice
) -> None:
    """Of rows that are whole words and begin at one, and of those that do not; what lies around
    stays.
    """
    every, into = randn(2, 9, 6, dim, seed=1).to(dtype), randn(2, 9, 6, dim, seed=2).to(dtype)
    want = into.clone()
    want[:, 3:, heads, part] = every[:, 1:7, heads, part]
    copy_words(into[:, 3:, heads, part], every[:, 1:7, heads, part])
    assert torch.equal(into, want)
