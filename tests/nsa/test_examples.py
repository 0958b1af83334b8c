"""What the documentation shows runs, and does what it says: README's block, examples/train_text.py,
examples/llama.py.
"""

from __future__ import annotations

import ast
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from examples import llama, train_text
from nsa import NSAConfig
from nsa.engagement import collect
from tests.cases import SMALL

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
TOKENS, VOCABULARY = 100, 61
# At 100 tokens each branch sees every key at or before the query; compressed blocks of one token
# are the tokens.
ALL = NSAConfig(cmp_block=1, cmp_stride=1, sel_block=16, num_selected=7, window=TOKENS)


pytestmark = pytest.mark.usefixtures("one_thread")


def test_readme_block_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """Exactly the code that is printed there; its results are those of the layer on whole and on
    single documents.
    """
    section = README.read_text(encoding="utf-8").partition("## NSA in your model\n")[2]
    code = section.partition("```python\n")[2].partition("```")[0]
    statements = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.stmt)]
    imports = [node for node in statements if isinstance(node, ast.Import | ast.ImportFrom)]
    assert len(statements) - len(imports) == 10
    torch.manual_seed(0)
    shown: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec"), shown)

    layer, x = shown["layer"], shown["x"]
    promised = code.partition("print(ran.counts)  # ")[2].partition(" on a CPU")[0]
    assert capsys.readouterr().out == f"{promised}\n"
    assert all(
        parameter.grad is not None and bool(parameter.grad.abs().sum() > 0)
        for parameter in layer.parameters()
    )
    with torch.no_grad():
        whole = layer(x[:, :1001])
        documents = torch.cat([layer(x[:1, :300]), layer(x[:1, 300:])], 1)
        one_document = layer(x[:1])
    packed = shown["packed"].detach()
    torch.testing.assert_close(
        torch.cat([shown["prefill"], shown["decode"]], 1), whole, atol=1e-5, rtol=0
    )
    torch.testing.assert_close(packed, documents, atol=1e-5, rtol=0)
    assert float((packed - one_document)[:, 300:].abs().max()) > 1e-2


def test_training_on_a_text_learns_and_writes(capsys: pytest.CaptureFixture[str]) -> None:
    """In 60 short steps already below what the bytes' frequencies give, and the sample continues
    the prompt.
    """
    outcome = train_text.run(README, steps=60, seq_len=128, prompt="## ", seed=0, max_new_tokens=20)
    count = Counter(README.read_bytes())
    by_hand = -sum(n / count.total() * math.log(n / count.total()) for n in count.values())
    assert outcome.unigram == pytest.approx(by_hand, abs=1e-9)
    # nearly ln 256: nothing is known yet
    assert len(outcome.losses) == 60 and outcome.losses[0] > 5.0
    assert sum(outcome.losses[-10:]) / 10 < by_hand - 0.3
    assert outcome.text.startswith("## ") and len(outcome.text) > len("## ")

    out = capsys.readouterr().out
    # planned, and run by both layers
    assert "sel: masked (sdpa, torch" in out and "'sel.masked': 2" in out
    assert out.count("tok/s") == 10 and outcome.text in out


def test_training_repeats_with_its_seed(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_bytes(bytes(range(256)) * 2)
    first, again, other = (
        train_text.run(file, steps=3, seq_len=64, prompt=None, seed=seed, max_new_tokens=5)
        for seed in (1, 1, 2)
    )
    assert first == again and first.losses != other.losses


@pytest.mark.parametrize(
    ("size", "arguments", "message"),
    [
        (None, [], "which is not a file; wanted a text"),
        (
            200,
            [],
            (
                "has 200 bytes; wanted at least 1139 for --seq-len 512; give a longer file or lower"
                " --seq-len"
            ),
        ),
        (72, ["--seq-len", "32"], "has 72 bytes; wanted at least 73"),
        (2000, ["--seq-len", "8"], "--seq-len 8; wanted at least 1 and 32"),
        (2000, ["--steps", "0"], "--steps 0"),
        (2000, ["--prompt", ""], "--prompt is empty"),
    ],
)
def test_training_says_what_is_missing(
    size: int | None,
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "text"
    if size is not None:
        file.write_bytes(b"a" * size)
    with pytest.raises(SystemExit) as exit_:
        train_text.main([str(file), *arguments])
    assert exit_.value.code == 2 and message in capsys.readouterr().err


def test_smallest_text_trains(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"ab" * 36 + b"a")
    assert train_text.main([str(tmp_path / "text"), "--seq-len", "32", "--steps", "1"]) == 0


def llama_of(**changes: Any) -> LlamaForCausalLM:
    """A tiny random Llama whose attention is peaked, so that another attention gives other
    logits.
    """
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=VOCABULARY, initializer_range=0.4, **(sizes | changes))
    ).eval()


def ids_of(batch: int = 2, tokens: int = TOKENS) -> Tensor:
    return torch.randint(0, VOCABULARY, (batch, tokens), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def difference(config: NSAConfig, **changes: Any) -> float:
    """Largest change of a logit when ``config`` takes the place of a Llama's own attention."""
    model = llama_of(**changes)
    expected = model(ids_of()).logits
    assert float(expected.abs().max()) > 1
    with collect() as ran:
        logits = llama.with_nsa(model, config)(ids_of()).logits
    assert {name.partition(".")[0] for name in ran.counts} == set(config.branches)
    return float((logits - expected).abs().max())


@pytest.mark.parametrize(
    "config",
    [
        ALL,
        replace(ALL, gate="softmax"),
        replace(ALL, branches=("sel", "win")),
        replace(ALL, branches=("win",)),
        replace(ALL, branches=("win",), gate="softmax"),
        replace(ALL, branches=("sel",), gate="softmax"),
        replace(ALL, branches=("cmp",), gate="softmax"),
    ],
    ids=lambda config: f"{'+'.join(config.branches)}-{config.gate}",
)
def test_llama_with_all_selected_is_the_original(config: NSAConfig) -> None:
    assert difference(config) < 1e-4


@pytest.mark.parametrize(
    "changes",
    [
        {"num_key_value_heads": 4},
        {"num_key_value_heads": 1},
        {"head_dim": 12},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}},
        {"tie_word_embeddings": True},
    ],
    ids=str,
)
def test_llama_of_other_shapes_is_the_original(changes: dict[str, Any]) -> None:
    assert difference(ALL, **changes) < 1e-4


def test_llama_comparison_can_fail() -> None:
    """One key fewer than all, in any branch, is seen; so is sparse attention."""
    for config in (
        replace(ALL, window=TOKENS - 1),
        replace(ALL, num_selected=6),
        replace(ALL, cmp_block=2),
        SMALL,
    ):
        assert difference(config) > 1e-3


def test_llama_keeps_weights_and_trains() -> None:
    model = llama_of()
    before = model.state_dict()
    model = llama.with_nsa(model, SMALL).train()
    after = model.state_dict()
    # the tensors themselves, not copies
    assert all(after[name].data_ptr() == tensor.data_ptr() for name, tensor in before.items())
    assert {name for name in after if name not in before} == {
        f"model.layers.{layer}.self_attn.gate.proj.{kind}"
        for layer in range(2)
        for kind in ("weight", "bias")
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(8):
        loss = model(ids_of(), labels=ids_of()).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.7 * losses[0]
    assert all(bool(parameter.grad.abs().sum() > 0) for parameter in model.parameters())


@torch.no_grad()
def test_llama_takes_packed_documents() -> None:
    model = llama.with_nsa(llama_of(), SMALL)
    ids = ids_of(1)
    positions = torch.cat([torch.arange(37), torch.arange(TOKENS - 37)])[None]
    packed = model(ids, cu_seq_lens_q=torch.tensor([0, 37, TOKENS]), position_ids=positions).logits
    single = torch.cat([model(ids[:, :37]).logits, model(ids[:, 37:]).logits], 1)
    torch.testing.assert_close(packed, single, atol=1e-4, rtol=0)


@torch.no_grad()
def test_llama_generates() -> None:
    """transformers' own generate, which reads the sequence again for each token."""
    model = llama.with_nsa(llama_of(), SMALL)
    ids = by_hand = ids_of(2, 30)
    for _ in range(5):
        by_hand = torch.cat([by_hand, model(by_hand).logits[:, -1:].argmax(-1)], 1)
    out = model.generate(ids, max_new_tokens=5, do_sample=False, eos_token_id=None)
    assert torch.equal(out, by_hand)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "wanted rope_type default or linear",
        ),
        ({"attention_bias": True}, "attention_bias=True; wanted projections without bias"),
        ({"attention_dropout": 0.1}, "attention_dropout=0.1; wanted 0"),
    ],
)
def test_llama_that_nsa_cannot_serve_is_refused(changes: dict[str, Any], message: str) -> None:
    model = llama_of(**changes)
    attention = model.model.layers[0].self_attn
    with pytest.raises(ValueError, match=message):
        llama.with_nsa(model, SMALL)
    assert model.model.layers[0].self_attn is attention  # untouched


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention_mask": torch.ones(2, TOKENS).tril(TOKENS - 2)}, "hides tokens"),
        ({"attention_mask": torch.ones(2, 1, TOKENS, TOKENS)}, "hides tokens"),
        ({"position_ids": torch.arange(1, TOKENS + 1)[None]}, "do not count from 0"),
        ({"use_cache": True}, "use_cache=True"),
        ({"cache": DynamicCache()}, "a cache of K and V"),
        ({"output_attentions": True}, "no attention matrix"),
    ],
    ids=["padding", "4-D mask", "positions", "use_cache", "cache", "attentions"],
)
def test_llama_refuses_what_nsa_ignores(options: dict[str, Any], message: str) -> None:
    model = llama.with_nsa(llama_of(), SMALL)
    with pytest.raises(ValueError, match=message):
        model(ids_of(), **options)


def test_llama_decoder_refuses_as_well() -> None:
    """Called without its head, and with the names of earlier versions."""
    decoder = llama.with_nsa(llama_of(), SMALL).model
    with pytest.raises(ValueError, match="a cache of K and V"):
        decoder(ids_of(), past_key_values=DynamicCache())
    with pytest.raises(ValueError, match="2 positional arguments"):
        decoder(ids_of(), torch.zeros(2, TOKENS))


@torch.no_grad()
def test_llama_takes_a_mask_and_positions_that_say_nothing() -> None:
    model = llama.with_nsa(llama_of(), SMALL)
    expected = model(
        ids_of(),
        attention_mask=torch.ones(2, TOKENS, dtype=torch.long),
        position_ids=torch.arange(TOKENS)[None],
    ).logits
    assert torch.equal(expected, model(ids_of()).logits)


def test_llama_is_converted_once() -> None:
    model = llama.with_nsa(llama_of(), SMALL)
    with pytest.raises(ValueError, match="NSA already"):
        llama.with_nsa(model, SMALL)


def test_llama_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    llama.main()
    equal, sparse = capsys.readouterr().out.splitlines()
    assert float(equal.rpartition(" ")[2]) < 1e-4 and "'sel.masked': 2" in sparse
