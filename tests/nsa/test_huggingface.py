"""`attn_implementation="nsa"`: models of transformers that nsa.huggingface converts."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path as Folder
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaModel,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    StaticCache,
    Trainer,
    TrainingArguments,
)

from nsa import NSAConfig, nsa_attention, oracle
from nsa.engagement import collect
from nsa.huggingface import convert, from_pretrained, register
from nsa.huggingface.interface import mask_of
from nsa.routing import Path
from tests.cases import PATHS_HERE, SMALL, here

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS, VOCABULARY = 100, 61
# At 100 tokens each branch sees every key at or before the query; compressed blocks of one token
# are the tokens.
ALL = NSAConfig(cmp_block=1, cmp_stride=1, sel_block=16, num_selected=7, window=TOKENS)
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": None}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 12}),
}
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.4,  # peaked attention, so that another attention gives other logits
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
every_family = pytest.mark.parametrize("family", FAMILIES)


def dense(family: str = "llama", **changes: Any) -> Any:
    config, model, own = FAMILIES[family]
    torch.manual_seed(0)
    return model(config(**(SIZES | own | changes))).eval()


def sparse(family: str = "llama", config: NSAConfig = SMALL, **changes: Any) -> Any:
    """A converted model whose gates differ by token, head and branch."""
    model = convert(dense(family, **changes), config)
    return moved(model)


@torch.no_grad()
def moved(model: Any) -> Any:
    """As after training: each parameter of NSA is another one."""
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if ".nsa." in name:
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def ids_of(batch: int = 2, tokens: int = TOKENS) -> Tensor:
    """Token ids without 0, which pads."""
    seeded = torch.Generator().manual_seed(1)
    return torch.randint(1, VOCABULARY, (batch, tokens), generator=seeded)


def padded(lengths: tuple[int, ...], *, left: bool) -> tuple[Tensor, Tensor, list[Tensor]]:
    """ids and attention_mask [B, T] of rows of these lengths, and the rows alone."""
    rows = [ids_of(len(lengths), max(lengths))[b, :n] for b, n in enumerate(lengths)]
    side = "left" if left else "right"
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_side=side)
    return ids, (ids != 0).long(), rows


def attentions(model: Any) -> Iterator[Any]:
    return (layer.self_attn for layer in model.model.layers)


# numbers


@every_family
@torch.no_grad()
def test_all_selected_is_the_dense_model(family: str) -> None:
    """With the gates of a conversion, whose sum is 1."""
    model = dense(family)
    expected = model(ids_of()).logits
    assert float(expected.abs().max()) > 1
    with collect() as ran:
        logits = convert(model, ALL)(ids_of()).logits
    assert {name.partition(".")[0] for name in ran.counts} == {"cmp", "sel", "win"}
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_key_value_heads": 4},
        {"num_key_value_heads": 1},
        {"head_dim": 12},
        {"attention_bias": True},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}},
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        {"tie_word_embeddings": True},
    ],
    ids=str,
)
@torch.no_grad()
def test_other_shapes_are_the_dense_model(changes: dict[str, Any]) -> None:
    model = dense(**changes)
    expected = model(ids_of()).logits
    torch.testing.assert_close(convert(model, ALL)(ids_of()).logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "branches", [("sel", "win"), ("cmp", "win"), ("win",), ("sel",), ("cmp",)], ids="+".join
)
def test_fewer_branches_are_the_dense_model(branches: tuple[str, ...]) -> None:
    """And every parameter has a gradient, which DistributedDataParallel waits for."""
    model = dense()
    expected = model(ids_of()).logits.detach()
    with collect() as ran:
        logits = convert(model, replace(ALL, branches=branches, phi="linear"))(ids_of()).logits
    assert {name.partition(".")[0] for name in ran.counts} == set(branches)
    torch.testing.assert_close(logits.detach(), expected, atol=1e-4, rtol=0)
    logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize(
    "config",
    [replace(ALL, window=TOKENS - 1), replace(ALL, num_selected=6), replace(ALL, cmp_block=2)],
    ids=["window", "selection", "compression"],
)
@torch.no_grad()
def test_one_key_fewer_is_seen(config: NSAConfig) -> None:
    model = dense()
    expected = model(ids_of()).logits
    assert float((convert(model, config)(ids_of()).logits - expected).abs().max()) > 1e-4


@pytest.mark.parametrize("phi", ["mean", "linear", "mlp"])
@every_family
@torch.no_grad()
def test_attention_is_the_oracles(family: str, phi: str) -> None:
    """fp64, given the q, k, v and states that the model produced; blocks compete."""
    config = replace(SMALL, phi=phi)
    model = sparse(family, config).double()
    seen: list[tuple[Any, ...]] = []

    def keep(layer: nn.Module, args: Any, _kwargs: Any, o: Tensor) -> None:
        seen.append((layer, *args, o))

    for attention in attentions(model):
        attention.scaling = 0.4
        attention.nsa.register_forward_hook(keep, with_kwargs=True)
    model(ids_of())
    assert len(seen) == 2
    for layer, hidden, q, k, v, o in seen:
        scale = 0.4
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        proj = layer.gate.proj
        gates = 1 / (1 + torch.exp(-(hidden @ proj.weight.T + proj.bias)))
        gates = gates.unflatten(-1, (q.shape[2], 3))
        k_cmp, v_cmp = (
            compressed(x, phi, part) for x, part in ((k, layer.phi_k), (v, layer.phi_v))
        )
        blocks, gap = oracle.select(q, k_cmp, config=SMALL, scale=scale)
        assert float(gap.min()) > 1e-7 and not bool((gap == torch.inf).all())
        of_branches = (
            oracle.compressed(q, k_cmp, v_cmp, block=8, stride=4, scale=scale)[0],
            oracle.selected(q, k, v, blocks, sel_block=16, scale=scale),
            oracle.sliding(q, k, v, window=24, scale=scale),
        )
        want = sum(gates[..., i : i + 1] * part for i, part in enumerate(of_branches))
        torch.testing.assert_close(o, want, atol=1e-10, rtol=1e-9)


def compressed(x: Tensor, phi: str, learned: Any) -> Tensor:
    if phi == "mean":
        return oracle.compress_mean(x, 8, 4)
    if phi == "linear":
        return oracle.compress_linear(x, learned.weight, 8, 4)
    return oracle.compress_mlp(x, learned.position, learned.up, learned.down, 8, 4)


@torch.no_grad()
def test_short_sequences_are_nearly_dense_after_conversion() -> None:
    """Why the compressed branch begins small: it reads means, the others the tokens that the model
    was trained on.
    """
    model, ids = dense(), ids_of(2, 24)
    expected = model(ids).logits
    convert(model, SMALL)
    begun = (model(ids).logits - expected).abs().mean()
    for attention in attentions(model):
        attention.nsa.gate.proj.bias.fill_(float(torch.logit(torch.tensor(1 / 3))))
    equal = (model(ids).logits - expected).abs().mean()
    assert 0 < float(begun) < 0.5 * float(equal)


def test_what_is_added_has_the_models_dtype_and_mode() -> None:
    """Of a model whose config names no dtype, converted after it was cast."""
    model = convert(dense().bfloat16().train(), replace(SMALL, phi="mlp"))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert all(module.training for module in model.modules())
    assert model(ids_of()).logits.dtype == torch.bfloat16
    assert not any(module.training for module in convert(dense(), SMALL).modules())


# padding and caches


@pytest.mark.parametrize("left", [True, False], ids=["left", "right"])
@every_family
@torch.no_grad()
def test_padded_rows_are_the_rows_alone(family: str, left: bool) -> None:
    model = sparse(family)
    ids, mask, rows = padded((TOKENS, 71, 3), left=left)
    logits = model(ids, attention_mask=mask).logits
    for b, row in enumerate(rows):
        alone = model(row[None]).logits[0]
        torch.testing.assert_close(logits[b][mask[b] != 0], alone, atol=3e-4, rtol=1e-4)


def test_padding_changes_no_gradient() -> None:
    """What lies in padding reaches no weight, and rows alone give the same gradients."""
    model = sparse(pad_token_id=None).train()  # an embedding with a padding_idx hides its gradient
    ids, mask, rows = padded((60, 41), left=True)
    labels = ids.masked_fill(mask == 0, -100)
    labels[1, 60 - 41] = -100  # padding predicts no first token
    model(ids, attention_mask=mask, labels=labels).loss.backward()
    got = {name: p.grad.clone() for name, p in model.named_parameters()}
    assert not bool(got["model.embed_tokens.weight"][0].any())
    model.zero_grad()
    tokens = sum(len(row) - 1 for row in rows)
    for row in rows:
        (model(row[None], labels=row[None]).loss * (len(row) - 1) / tokens).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(got[name], parameter.grad, atol=2e-4, rtol=2e-3, msg=name)


@pytest.mark.parametrize("chunks", [(40, 1, 1, 30, 1, 27), (1,) * 20, (99, 1)], ids=str)
@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
@torch.no_grad()
def test_cached_chunks_are_the_whole_sequence(kind: Any, chunks: tuple[int, ...]) -> None:
    model = sparse("qwen3")
    ids = ids_of(2, sum(chunks))
    room = {"max_cache_len": 128} if kind is StaticCache else {}
    cache = kind(config=model.config, **room)
    parts = [model(part, cache=cache).logits for part in ids.split(chunks, 1)]
    want = model(ids, use_cache=False).logits
    torch.testing.assert_close(torch.cat(parts, 1), want, atol=2e-4, rtol=1e-4)


@torch.no_grad()
def test_cached_chunks_of_padded_rows_are_the_rows_alone() -> None:
    """Left padding, a chunk that is padding and tokens, then single tokens."""
    model = sparse()
    ids, mask, rows = padded((90, 57), left=True)
    cache, done, parts = DynamicCache(config=model.config), 0, []
    for part in ids.split((30, 20, 30, *(1,) * 10), 1):
        done += part.shape[1]
        parts.append(model(part, attention_mask=mask[:, :done], cache=cache).logits)
    logits = torch.cat(parts, 1)
    for b, row in enumerate(rows):
        alone = model(row[None]).logits[0]
        torch.testing.assert_close(logits[b][mask[b] != 0], alone, atol=3e-4, rtol=1e-4)


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "top_k": 20},
    "beams": {"do_sample": False, "num_beams": 3},
}


@pytest.mark.parametrize("way", WAYS)
@every_family
def test_generate_with_a_cache_is_that_without(family: str, way: str) -> None:
    """Left-padded prompts, past the window and where blocks compete."""
    model = sparse(family)
    ids, mask, _ = padded((84, 70), left=True)
    outs = []
    for use_cache in (True, False):
        torch.manual_seed(3)
        outs.append(
            model.generate(
                ids, attention_mask=mask, max_new_tokens=8, use_cache=use_cache, **WAYS[way]
            )
        )
    assert outs[0].shape == (2, 92) and torch.equal(*outs)


def test_generate_takes_a_prompt_in_chunks() -> None:
    model, ids = sparse(), ids_of(2, 84)
    options = {"max_new_tokens": 4, "do_sample": False}
    chunked = model.generate(ids, prefill_chunk_size=32, **options)
    assert torch.equal(chunked, model.generate(ids, use_cache=False, **options))


def test_generate_with_a_static_cache() -> None:
    model, (ids, mask, _) = sparse(), padded((84, 70), left=True)
    options = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
    static = model.generate(ids, cache_implementation="static", **options)
    assert torch.equal(static, model.generate(ids, use_cache=False, **options))


@torch.no_grad()
def test_compiled_forward_is_the_eager_one() -> None:
    """Without a mask, which transformers would make one of documents."""
    model, ids = sparse(num_hidden_layers=1), ids_of(1, 40)
    compiled = torch.compile(model, backend="eager", dynamic=False)
    got = compiled(ids, use_cache=False).logits
    torch.testing.assert_close(got, model(ids).logits, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_packed_documents_are_those_alone() -> None:
    model, ids = sparse(), ids_of(1)
    positions = torch.cat([torch.arange(37), torch.arange(TOKENS - 37)])[None]
    ends = torch.tensor([0, 37, TOKENS])
    single = torch.cat([model(ids[:, :37]).logits, model(ids[:, 37:]).logits], 1)
    for given in ({}, {"position_ids": positions}, {"position_ids": positions, "use_cache": True}):
        packed = model(ids, cu_seq_lens_q=ends, **({"use_cache": False} | given)).logits
        torch.testing.assert_close(packed, single, atol=2e-4, rtol=0)


@pytest.mark.parametrize("path", [path for path in PATHS_HERE if path is not Path.MASKED])
def test_every_path_takes_what_transformers_hands_on(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads before tokens in memory, rows of different lengths, a chunk after a cache: results and
    gradients are those of path masked.
    """
    model = sparse(num_hidden_layers=1, head_dim=16).train()
    tokens = here(90, 50)
    ids, mask, _ = padded((tokens, tokens - 13), left=True)
    answers = []
    for name in (path, Path.MASKED):
        asked = partial(nsa_attention, path=name)
        monkeypatch.setattr("nsa.huggingface.layer.nsa_attention", asked)
        model.zero_grad()
        with collect() as ran:
            logits = model(ids, attention_mask=mask).logits
            logits[mask != 0].square().mean().backward()
        assert f"sel.{name.value}" in ran.counts
        with torch.no_grad():
            cache = DynamicCache(config=model.config)
            model(ids[:, :-1], attention_mask=mask[:, :-1], cache=cache)
            last = model(ids[:, -1:], attention_mask=mask, cache=cache).logits
        gradients = [p.grad.clone() for p in model.parameters()]
        answers.append([logits[mask != 0].detach(), last, *gradients])
    for got, want in zip(*answers, strict=True):
        torch.testing.assert_close(got, want, atol=5e-4, rtol=2e-3)


# saving


@pytest.mark.parametrize("phi", ["mean", "linear", "mlp"])
@every_family
@torch.no_grad()
def test_what_nsa_learned_is_saved_and_comes_back(family: str, phi: str, tmp_path: Folder) -> None:
    """FAULTS "models that are saved": gates and phi bit for bit, and the config with them."""
    config = replace(SMALL, phi=phi)
    model = sparse(family, config)
    model.save_pretrained(tmp_path)
    loaded = from_pretrained(str(tmp_path))
    assert type(loaded) is type(model)
    same(model, loaded)
    # the same bits at other addresses, where a matrix product may round otherwise
    torch.testing.assert_close(loaded(ids_of()).logits, model(ids_of()).logits, atol=1e-4, rtol=0)
    assert NSAConfig.from_mapping(loaded.config.nsa) == next(attentions(model)).nsa.config
    loaded.save_pretrained(tmp_path / "again")
    same(model, from_pretrained(str(tmp_path / "again"), type(model)))
    for folder in (tmp_path, tmp_path / "again"):
        stored = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        assert stored["attn_implementation"] == "nsa" and stored["nsa"]["phi"] == phi


def same(model: nn.Module, other: nn.Module) -> None:
    left, right = model.state_dict(), other.state_dict()
    assert left.keys() == right.keys() and any(".nsa." in name for name in left)
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype and torch.equal(tensor, right[name]), name


@torch.no_grad()
def test_shards_and_dtypes_come_back(tmp_path: Folder) -> None:
    """FAULTS "models that are saved": in several files, in bfloat16, and as another dtype."""
    model = sparse(config=replace(SMALL, phi="mlp")).bfloat16()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    same(model, from_pretrained(str(tmp_path)))
    wide = from_pretrained(str(tmp_path), dtype=torch.float32)
    assert {p.dtype for p in wide.parameters()} == {torch.float32}
    same(model, wide.bfloat16())


@torch.no_grad()
def test_what_the_config_knows_is_changed_as_transformers_does(tmp_path: Folder) -> None:
    model = sparse()
    model.save_pretrained(tmp_path)
    loaded = from_pretrained(str(tmp_path), attention_dropout=0.25, use_cache=False)
    assert loaded.config.attention_dropout == 0.25 and loaded.config.use_cache is False
    same(model, loaded)
    same(model, from_pretrained(str(tmp_path), config=str(tmp_path)))
    with pytest.raises(ValueError, match="model_class is AutoModelForCausalLM; wanted the class"):
        from_pretrained(str(tmp_path), AutoModelForCausalLM)


@torch.no_grad()
def test_a_decoder_alone_and_another_head_are_loaded(tmp_path: Folder) -> None:
    """FAULTS "models that are saved": as a class that was not stored."""
    model = sparse()
    model.save_pretrained(tmp_path)
    decoder = from_pretrained(str(tmp_path), LlamaModel)
    same(model.model, decoder)
    want = model.model(ids_of()).last_hidden_state
    torch.testing.assert_close(decoder(ids_of()).last_hidden_state, want, atol=1e-4, rtol=0)
    classifier = from_pretrained(str(tmp_path), LlamaForSequenceClassification)
    same(model.model, classifier.model)


def test_a_checkpoint_without_its_gates_is_refused(tmp_path: Folder) -> None:
    """FAULTS "models that are saved": new gates are never made in silence."""
    sparse().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    lost = {name: x for name, x in tensors.items() if not name.endswith("nsa.gate.proj.bias")}
    save_file(lost, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"missing keys of NSA: .*gate\.proj\.bias.* \(2\)"):
        from_pretrained(str(tmp_path))


def test_a_checkpoint_of_another_phi_is_refused(tmp_path: Folder) -> None:
    model = sparse(config=replace(SMALL, phi="linear"))
    model.config.nsa["phi"] = "mean"
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="unexpected keys of NSA: .*phi_k.weight"):
        from_pretrained(str(tmp_path))


@pytest.mark.parametrize("loader", [LlamaForCausalLM, AutoModelForCausalLM])
def test_plain_loading_is_no_silent_dense_model(loader: Any, tmp_path: Folder) -> None:
    """FAULTS "models that are saved": transformers' own from_pretrained knows no gates, and the
    first forward says so.
    """
    sparse().save_pretrained(tmp_path)
    model = loader.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="without gates; wanted a model that nsa.huggingface"):
        model(ids_of())


def test_a_dense_checkpoint_is_refused(tmp_path: Folder) -> None:
    dense().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has no nsa in its config"):
        from_pretrained(str(tmp_path))


def test_a_process_that_never_registered_loads_no_dense_model(
    tmp_path: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FAULTS "models that are saved": config.json asks for an implementation that is unknown
    there.
    """
    sparse().save_pretrained(tmp_path)
    for interface in (AttentionInterface, AttentionMaskInterface):
        monkeypatch.delitem(interface._global_mapping, "nsa")
    with pytest.raises(ValueError, match='attn_implementation="nsa"` is not supported'):
        LlamaForCausalLM.from_pretrained(tmp_path)


def test_nothing_imports_transformers_before_it_is_needed() -> None:
    code = (
        "import sys, nsa.huggingface; nsa.huggingface.convert; print('transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


# training


@every_family
def test_every_parameter_is_trained(family: str) -> None:
    model = convert(dense(family), replace(SMALL, phi="linear")).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(6):
        loss = model(ids_of(), labels=ids_of()).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.8 * losses[0]
    assert all(bool(p.grad.abs().sum() > 0) for p in model.parameters())


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_changes_no_gradient(reentrant: bool) -> None:
    model = sparse().train()
    plain = copy.deepcopy(model)
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    ids, mask, _ = padded((60, 41), left=True)
    calls: list[nn.Module] = []
    for attention in attentions(model):
        attention.nsa.register_forward_pre_hook(lambda layer, _args: calls.append(layer))
    for one in (model, plain):
        one(ids, attention_mask=mask, labels=ids, use_cache=False).loss.backward()
    assert len(calls) == 4  # each layer twice
    for (name, got), want in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(got.grad, want.grad), name


def test_autocast_runs_attention_in_its_dtype() -> None:
    """RoPE of a float32 model leaves q and k in float32, v comes in bfloat16."""
    model = sparse().train()
    seen: list[torch.dtype] = []
    for attention in attentions(model):
        attention.nsa.register_forward_hook(lambda _module, _args, o: seen.append(o.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(ids_of(), labels=ids_of()).loss
    loss.backward()
    assert set(seen) == {torch.bfloat16}
    assert abs(float((loss - model(ids_of(), labels=ids_of()).loss).detach())) < 0.2
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters())


def test_trainer_takes_ten_steps_and_saves(tmp_path: Folder) -> None:
    model = convert(dense(), SMALL)
    before = copy.deepcopy(model.state_dict())
    rows = [{"input_ids": row, "labels": row} for row in ids_of(8, 90)]
    arguments = TrainingArguments(
        str(tmp_path),
        max_steps=10,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        activation_checkpointing=True,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=rows)
    assert trainer.train().global_step == 10
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 10 and losses[-1] < losses[0]
    trainer.save_model(str(tmp_path / "saved"))
    loaded = from_pretrained(str(tmp_path / "saved"))
    same(model, loaded)
    for name, tensor in loaded.state_dict().items():
        assert not torch.equal(tensor, before[name]), name


def test_lora_trains_q_and_v_and_saves_the_gates(tmp_path: Folder) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model

    base = convert(dense(), SMALL)
    base.save_pretrained(tmp_path / "base")
    lora = LoraConfig(
        r=2,
        target_modules=["q_proj", "v_proj"],
        modules_to_save=["nsa"],
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(base, lora).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        model(ids_of(), labels=ids_of()).loss.backward()
        optimizer.step()
    learned = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {name.partition("self_attn.")[2].partition(".")[0] for name in learned} == {
        "q_proj",
        "v_proj",
        "nsa",
    }
    model.save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(
        from_pretrained(str(tmp_path / "base")), str(tmp_path / "adapter")
    )
    with torch.no_grad():
        want = model.eval()(ids_of()).logits
        assert torch.equal(again.eval()(ids_of()).logits, want)
        assert float((from_pretrained(str(tmp_path / "base"))(ids_of()).logits - want).abs().max())
        options = {"max_new_tokens": 4, "do_sample": False}
        assert torch.equal(
            again.generate(input_ids=ids_of(), **options),
            again.generate(input_ids=ids_of(), use_cache=False, **options),
        )
        merged = model.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    same(merged, from_pretrained(str(tmp_path / "merged")))


# what is refused


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        (
            "mistral",
            {"sliding_window": 32},
            "sliding_window=32 .* load it with sliding_window=None",
        ),
        (
            "qwen3",
            {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1},
            "layers of .*sliding_attention",
        ),
        ("llama", {"head_dim": 3}, "head_dim=3 must be even"),
    ],
)
def test_a_model_that_nsa_cannot_serve_is_refused(
    family: str, changes: dict[str, Any], message: str
) -> None:
    model = dense(family, **changes)
    with pytest.raises(ValueError, match=message):
        convert(model, SMALL)
    assert not any(".nsa" in name for name, _ in model.named_modules())
    assert getattr(model.config, "nsa", None) is None  # untouched


def test_other_models_are_refused() -> None:
    with pytest.raises(ValueError, match="type 'gpt2'; wanted one of llama, mistral, qwen2, qwen3"):
        convert(GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=VOCABULARY)))
    with pytest.raises(ValueError, match="got a Linear; wanted a model of transformers"):
        convert(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="nsa already"):
        convert(sparse(), SMALL)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gate": "softmax"}, "gate='softmax'; wanted 'sigmoid'"),
        ({"cmp_rope": "after"}, "cmp_rope='after'; wanted 'before'"),
        ({"rope": "half"}, "rope='half'; wanted 'interleaved': the model rotates"),
        ({"rope_base": 500.0}, "rope_base=500.0; wanted 10000.0"),
        ({"rope_scale": 0.5}, "rope_scale=0.5; wanted 1.0"),
        ({"adaptive_num_selected": True}, "adaptive_num_selected=True; wanted False"),
        ({"softcap": 30.0}, "softcap=30.0; wanted None: the model's own attention has none"),
        ({"sinks": True}, "sinks=True; wanted False"),
        ({"qk_norm": True}, "qk_norm=True; wanted False"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_options_that_attention_cannot_have_are_refused(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        convert(dense(), replace(SMALL, **options))


ANEW = torch.cat([torch.arange(37), torch.arange(TOKENS - 37)]).expand(2, -1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"output_attentions": True}, "output_attentions=True, and NSA has no matrix"),
        ({"attention_mask": torch.ones(2, 1, TOKENS, TOKENS)}, r"\(2, 1, 100, 100\); wanted \[B"),
        ({"attention_mask": torch.ones(2, TOKENS, TOKENS)}, "for 100 keys; wanted"),
        ({"attention_mask": torch.zeros(TOKENS)}, "for 100 keys; wanted"),
        ({"attention_mask": torch.ones(2, TOKENS - 1)}, "for 100 keys; wanted"),
        ({"position_ids": ANEW}, "do not count up by 1"),
        ({"position_ids": ANEW, "use_cache": False}, "do not count up by 1"),
        ({"softcap": 30.0}, "caps its logits .softcap=30.0"),
        ({"s_aux": torch.zeros(4)}, "has attention sinks"),
        ({"sliding_window": 32}, "has a sliding window of its own .* config.sliding_window=None"),
    ],
    ids=[
        "attentions",
        "4-D",
        "3-D",
        "1-D",
        "short mask",
        "positions",
        "packed",
        "softcap",
        "sinks",
        "window",
    ],
)
def test_arguments_that_nsa_would_ignore_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sparse()(ids_of(), **options)


def test_packed_documents_take_neither_padding_nor_a_cache() -> None:
    ids, mask, _ = padded((60, 41), left=True)
    with pytest.raises(ValueError, match="cu_seq_lens_q and padding"):
        sparse()(ids, attention_mask=mask, cu_seq_lens_q=torch.tensor([0, 30, 60]))


def test_a_static_cache_inside_a_compiled_region_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(ValueError, match="StaticCache inside torch.compile.*disable_compile=True"):
        mask_of(q_length=1, kv_length=128, q_offset=torch.tensor(40))


def test_dropout_is_refused_in_training_alone() -> None:
    model = sparse(attention_dropout=0.1)
    model(ids_of())
    with pytest.raises(ValueError, match="dropout=0.1 in training, and NSA drops nothing"):
        model.train()(ids_of())


def test_a_window_that_was_set_later_is_refused() -> None:
    model = sparse("mistral")
    model.config.sliding_window = 32
    with pytest.raises(ValueError, match="sliding window or chunk of 32 tokens"):
        model(ids_of())


def test_a_model_that_was_not_converted_is_refused() -> None:
    register()
    config = LlamaConfig(**SIZES)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation="nsa")
    with pytest.raises(ValueError, match="without gates; .* call convert"):
        model(ids_of())


@torch.no_grad()
def test_dense_attention_is_a_setting_away() -> None:
    """To compare: the same weights, other attention, and back."""
    model, plain = sparse(), dense()
    before = model(ids_of()).logits
    model.set_attn_implementation("sdpa")
    torch.testing.assert_close(model(ids_of()).logits, plain(ids_of()).logits, atol=1e-5, rtol=0)
    model.set_attn_implementation("nsa")
    assert torch.equal(model(ids_of()).logits, before)
