"""The estimate against models that are built, tensors that autograd saves, and memory that an
H200 measured.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import cross_entropy

from nsa import capability
from nsa.config import ModelConfig, preset
from nsa.model import DenseLM, TinyLM
from nsa.train import activations, estimate
from nsa.train.activations import Pass
from nsa.train.config import DataConfig, LoopConfig, RunConfig
from nsa.train.data import vocabulary_size
from nsa.train.data.corpora import TextDocument
from nsa.train.data.vocabulary import train_bpe
from nsa.train.published import PublishedSpeed, published
from nsa.train.yaml_file import read_config

ROOT = Path(__file__).parents[3]
TINY = preset("tiny")
CPU = capability.assumed("none")
H200 = capability.assumed("h200")


def tiny(**options: object) -> ModelConfig:
    return replace(TINY, nsa=replace(TINY.nsa, **options))  # type: ignore[arg-type]


MODELS = {
    "sigmoid": TINY,
    "softmax": tiny(gate="softmax"),
    "no gate": tiny(gate="none"),
    "linear": tiny(phi="linear"),
    "mlp": tiny(phi="mlp"),
    "wide mlp": tiny(phi="mlp", phi_hidden=24),
    "shared": tiny(share_kv=True),
    "norms": tiny(qk_norm=True),
    "sel, win": tiny(branches=("sel", "win")),
    "cmp, win": tiny(branches=("cmp", "win")),
    "odd sizes": replace(tiny(phi="linear"), num_heads=6, vocab_size=99, mlp_ratio=3),
}
COUNTED = {
    **MODELS,
    "values": replace(tiny(phi="mlp"), v_head_dim=24),
    "m7c_125m": preset("m7c_125m"),
    "sinks": tiny(sinks=True),
    "layers": replace(TINY, layers=(TINY.nsa, TINY.nsa.full_attention())),
}


@pytest.mark.parametrize("name", COUNTED)
def test_parameters_are_those_of_the_model(name: str) -> None:
    model = COUNTED[name]
    with torch.device("meta"):
        built = {"nsa": TinyLM(model), "dense": DenseLM(model)}
    for attention, one in built.items():
        parts = estimate.count_parameters(model, attention=attention)
        assert sum(parts.values()) == sum(p.numel() for p in one.parameters())
        wanted = {"embedding": one.embedding, "head": one.head}
        for part, module in wanted.items():
            assert parts[part] == sum(p.numel() for p in module.parameters())
        mlp = sum(p.numel() for n, p in one.named_parameters() if ".mlp." in n)
        norms = sum(p.numel() for n, p in one.named_parameters() if "norm" in n)
        assert (parts["MLP"], parts["norms"]) == (mlp, norms)


def saved_bytes(model: ModelConfig, batch: int, tokens: int, attention: str, path: str) -> int:
    """Bytes of the storages that autograd saves of a forward and its loss, the weights aside."""
    torch.manual_seed(0)
    built = TinyLM(model, path=path) if attention == "nsa" else DenseLM(model)
    weights = {p.untyped_storage().data_ptr() for p in built.parameters()}
    sizes: dict[int, int] = {}
    kept: list[Tensor] = []  # so that no address is used again

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in weights:
            sizes[storage.data_ptr()] = storage.nbytes()
            kept.append(x)
        return x

    ids = torch.randint(0, model.vocab_size, (batch, tokens))
    with saved_tensors_hooks(pack, lambda x: x):
        cross_entropy(built(ids).flatten(0, 1), ids.flatten())
    return sum(sizes.values())


def estimated_bytes(model: ModelConfig, batch: int, tokens: int, attention: str, path: str) -> int:
    train = LoopConfig(
        batch=batch, seq_len=tokens, attention=attention, path=path, precision="fp32"
    )
    found = estimate.estimate(RunConfig(model=model, train=train), CPU)
    return found.memory_bytes["activations"]


@pytest.mark.parametrize("tokens", [100, 128])
@pytest.mark.parametrize("path", ["masked", "v2"])
@pytest.mark.parametrize("name", MODELS)
def test_activations_are_what_autograd_saves(name: str, path: str, tokens: int) -> None:
    """The measured ratio is 1.0000; left out are scalars, and views where a batch of 1 copies
    nothing.
    """
    measured = saved_bytes(MODELS[name], 2, tokens, "nsa", path)
    assert estimated_bytes(MODELS[name], 2, tokens, "nsa", path) == pytest.approx(measured, abs=64)


@pytest.mark.parametrize("name", ["sigmoid", "norms", "odd sizes"])
def test_activations_of_the_dense_twin(name: str) -> None:
    measured = saved_bytes(MODELS[name], 2, 128, "dense", "auto")
    assert estimated_bytes(MODELS[name], 2, 128, "dense", "auto") == pytest.approx(measured, abs=64)


@pytest.mark.parametrize(
    "model", [TINY, replace(TINY, layers=(TINY.nsa, TINY.nsa.full_attention()))]
)
@pytest.mark.parametrize("tokens", [20, 60, 128])
def test_activations_of_what_auto_takes(model: ModelConfig, tokens: int) -> None:
    """At 20 tokens the window covers all, at 60 the selected blocks do: full causal attention."""
    measured = saved_bytes(model, 2, tokens, "nsa", "auto")
    assert estimated_bytes(model, 2, tokens, "nsa", "auto") == pytest.approx(measured, abs=64)


def test_a_checkpointed_layer_keeps_its_input() -> None:
    model = replace(TINY, num_layers=3, checkpoint_layers=(1, 3))
    measured = saved_bytes(model, 2, 128, "nsa", "masked")
    assert estimated_bytes(model, 2, 128, "nsa", "masked") == pytest.approx(measured, abs=64)


M7C = preset("m7c_125m")


def on_h200(model: ModelConfig = M7C, **options: object) -> RunConfig:
    train = LoopConfig(**{"precision": "bf16", **options})  # type: ignore[arg-type]
    return RunConfig(model=model, train=train)


@pytest.mark.parametrize(
    "row",
    [one for one in published() if not one.compile],
    ids=lambda row: f"{row.attention}-{row.batch}x{row.seq_len}-{row.cuda_graph}",
)
def test_memory_is_what_an_h200_measured(row: PublishedSpeed) -> None:
    """Peaks of eager steps in reports/evidence/train-eager-h200: 0.986 to 1.066 of them were
    estimated; from a graph, whose pool keeps more, 0.900 (1 x 2,048) to 1.031.
    """
    shape = on_h200(attention=row.attention, batch=row.batch, seq_len=row.seq_len)
    found = estimate.estimate(shape, H200)
    own = found.total_bytes - found.memory_bytes["CUDA context and margin"]
    least, most = (0.89, 1.04) if row.cuda_graph else (0.98, 1.07)
    assert least <= own / row.peak_memory_bytes <= most


def test_bytes_of_a_parameter_by_precision() -> None:
    """AdamW holds two moments in the dtype that it steps; a master and its gradient are fp32."""
    wanted = {"bf16_master": 2 + 2 + 4 + 4 + 8, "bf16": 8, "autocast": 16, "fp32": 16}
    parts = ("weights", "gradients", "masters", "optimizer")
    for precision, size in wanted.items():
        found = estimate.estimate(on_h200(precision=precision), H200)
        assert sum(found.memory_bytes[one] for one in parts) == size * found.num_parameters


def test_a_larger_vocabulary_costs_its_logits() -> None:
    config = on_h200(batch=1)
    small, large = (estimate.estimate(one, H200) for one in (config, config.with_vocab(32_768)))
    assert large.parameters["head"] == 32_768 * 768
    logits = 2048 * (32_768 - 256) * 4  # fp32
    grown = large.memory_bytes["activations"] - small.memory_bytes["activations"]
    assert grown == logits
    assert large.memory_bytes["loss and backward"] > 2 * logits


def test_vocabulary_is_the_tokenizers(tmp_path: Path) -> None:
    """Bytes of text have an end of text, too; a file has what it has; neither is model's own."""
    text = TextDocument("numbers", " ".join(map(str, range(3000))).encode(), "here")
    train_bpe([text], 700).save(tmp_path)
    path = tmp_path / "tokenizer.json"
    found = [
        vocabulary_size(RunConfig(data=DataConfig(kind="text", paths=("a.txt",), **options)))
        for options in (
            {},
            {"tokenizer": "file", "tokenizer_path": str(path)},
            {"tokenizer": "bpe", "vocab_size": 4096},
        )
    ]
    assert found == [257, 700, 4096]


def test_checkpointing_trades_memory_for_a_layer() -> None:
    full = estimate.estimate(on_h200(batch=8), H200)
    model = replace(preset("m7c_125m"), checkpoint_layers=(0, 12))
    ckpt = estimate.estimate(on_h200(model, batch=8), H200)
    assert ckpt.memory_bytes["recomputed layer"] == full.activation_bytes[0]
    assert ckpt.total_bytes < full.total_bytes / 2
    assert ckpt.activation_bytes == (8 * 2048 * 768 * 2,) * 12


def test_largest_batch_fits_and_the_next_does_not() -> None:
    for gpu in ("h200", "rtx4090"):
        where = capability.assumed(gpu)
        card = estimate.CARD_BYTES[where.device_name]
        largest = estimate.estimate(on_h200(seq_len=8192), where).largest_batch
        assert largest is not None
        totals = [
            estimate.estimate(on_h200(seq_len=8192, batch=batch), where).total_bytes
            for batch in (largest, largest + 1)
        ]
        assert totals[0] <= 0.9 * card < totals[1]
    where = replace(H200, device_name="NVIDIA X")
    assert estimate.estimate(on_h200(), where).largest_batch is None
    none = estimate.estimate(on_h200(seq_len=8192), H200, card_bytes=10**9)
    assert none.largest_batch == 0 and none.free_pct is not None and none.free_pct < 0


def test_time_is_that_of_a_published_speed_alone() -> None:
    config = on_h200(batch=8, steps=1000, compile=True, accumulate=2)
    found = estimate.estimate(config, H200)
    assert found.eta_s == pytest.approx(1000 * 2 * 8 * 2048 / 438_771)
    assert any(
        "438,771 tok/s of 8 x 2,048 tokens on one NVIDIA H200" in value for _, value in found.rows()
    )
    more = estimate.estimate(replace(config, train=replace(config.train, batch=16)), H200)
    assert more.eta_s == pytest.approx(1000 * 2 * 16 * 2048 / 438_771)
    shape = "of 8 x 2,048 tokens, not measured at batch 16, on one"
    assert any(shape in value for _, value in more.rows())
    unknown = estimate.estimate(replace(config, model=TINY), H200)
    assert unknown.eta_s is None
    assert ("time of all steps", estimate.NOT_MEASURED) in unknown.rows()
    assert estimate.estimate(config, capability.assumed("h100")).eta_s is None


def test_packed_documents_are_one_row_that_is_not_whole() -> None:
    rows = on_h200(TINY, batch=1, seq_len=64, precision="fp32")
    packed = replace(rows, data=DataConfig(kind="synthetic", packing="documents"))
    routes = [
        estimate.routes_of(one, CPU)[0].branch("sel").implementation for one in (rows, packed)
    ]
    assert routes == ["dense", "masked"]
    assert any("packed documents" in note for note in estimate.estimate(packed, CPU).notes)


def test_a_slow_path_is_a_lower_bound() -> None:
    found = estimate.estimate(on_h200(TINY, path="reference", precision="fp32"), CPU)
    assert found.notes == ("path reference keeps more than this estimate has: it is a lower bound",)


VARIANTS = {"24gb": ("rtx4090", 24), "40gb": ("a100", 40), "80gb": ("h100", 80)}
VARIANTS["141gb"] = ("h200", 141)


@pytest.mark.parametrize("name", VARIANTS)
def test_variant_fits_its_card(name: str) -> None:
    gpu, size = VARIANTS[name]
    config = read_config(str(ROOT / f"configs/m7c_125m-{name}.yaml"))
    found = estimate.estimate(config, capability.assumed(gpu), card_bytes=size * 10**9)
    assert found.free_pct is not None and found.free_pct >= estimate.HEADROOM_PCT
    doubled = replace(config, train=replace(config.train, batch=2 * config.train.batch))
    more = estimate.estimate(doubled, capability.assumed(gpu), card_bytes=size * 10**9)
    assert more.free_pct is not None and more.free_pct < estimate.HEADROOM_PCT
    base = read_config(str(ROOT / "configs/m7c_125m.yaml"))
    assert found.tokens_per_step == base.tokens_per_step == 262_144
    assert config.model == base.model == preset("m7c_125m")


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda p: p.stem)
def test_shipped_config_is_read_and_estimated(path: Path) -> None:
    config = read_config(str(path))
    assert config.out == f"runs/{path.stem}"
    assert estimate.estimate(config, CPU).total_bytes > 0


def test_needs_no_torch() -> None:
    code = (
        "import sys; from nsa import capability; from nsa.train import estimate;"
        "from nsa.train.config import RunConfig;"
        "estimate.estimate(RunConfig(), capability.assumed('h200'));"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_a_pass_on_a_gpu_keeps_no_normalised_copy() -> None:
    """RMSNorm is one kernel there."""
    on_cpu = Pass(2, 128, 4, 4, on_gpu=False)
    copies = 2 * 2 * 128 * 64 * 4
    kept = [
        activations.of_layer(TINY, 0, one, None) for one in (on_cpu, replace(on_cpu, on_gpu=True))
    ]
    assert kept[0] - kept[1] == copies


def test_sdpa_of_values_of_another_size_is_a_lower_bound() -> None:
    """Its fused kernels do not serve them, and the other one keeps the probabilities."""
    model = replace(TINY, v_head_dim=24)
    config = on_h200(model, batch=2, seq_len=128, precision="fp32", path="masked")
    found = estimate.estimate(config, CPU)
    assert found.memory_bytes["activations"] < saved_bytes(model, 2, 128, "nsa", "masked")
    assert any("a lower bound" in note for note in found.notes)
