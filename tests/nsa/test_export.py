"""FAULTS 'torch.export with a dynamic length': one program for every length in the range, equal to
eager.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, export

from nsa import ModelConfig, NSAAttention, NSAConfig, nsa_attention
from nsa.model import TinyLM
from nsa.routing import Path
from tests.cases import FAST_PATHS, SMALL, assert_parity, randn

RANGE = Dim("T", min=65, max=1024)
# of blocks and of windows (16, 24) multiples and not; some in which every block is selected
LENGTHS = (65, 80, 101, 240, 1024)
# reference and v1 build lists from the chosen blocks on the host, which no program holds
PATHS = [path for path in FAST_PATHS if path is not Path.TRITON]

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def no_cache_of_shapes() -> Iterator[None]:
    """torch remembers what each operator makes of its inputs' shapes, and hardly any call here
    repeats another's: without it an export takes a quarter less. The tests that do not ask for
    this export as a user does.
    """
    import torch._dynamo

    with torch._dynamo.config.patch(fake_tensor_cache_enabled=False):
        yield


def layer(path: str, config: NSAConfig = SMALL) -> NSAAttention:
    torch.manual_seed(0)
    return NSAAttention(32, 4, 2, 16, None, config, path=path, fa2="off").eval()


def exported(model: nn.Module, example: Tensor, *, strict: bool = False) -> nn.Module:
    return export(model, (example,), dynamic_shapes=({1: RANGE},), strict=strict).module()


def assert_equal_at_every_length(program: nn.Module, model: nn.Module, batch: int = 1) -> None:
    for tokens in LENGTHS:
        x = randn(batch, tokens, 32, seed=tokens)
        assert_parity(program(x), model(x), f"{tokens} tokens")


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_one_program_of_a_layer_serves_every_length(path: Path, strict: bool) -> None:
    model = layer(path)
    program = exported(model, randn(1, 200, 32, seed=0), strict=strict)
    assert_equal_at_every_length(program, model)


@pytest.mark.usefixtures("no_cache_of_shapes")
@pytest.mark.parametrize(
    "config",
    [
        NSAConfig(),
        replace(SMALL, phi="linear"),
        replace(SMALL, phi="mlp", rope="half"),
        replace(SMALL, selection="hierarchical"),
        replace(SMALL, branches=("sel", "win")),
    ],
    ids=["paper", "linear", "mlp", "hierarchical", "sel-win"],
)
def test_other_configs_export_too(config: NSAConfig) -> None:
    model = layer("masked", config)
    assert_equal_at_every_length(exported(model, randn(1, 200, 32, seed=0)), model)


@pytest.mark.usefixtures("no_cache_of_shapes")
@pytest.mark.parametrize("path", PATHS)
def test_a_batch_of_two(path: Path) -> None:
    model = layer(path)
    program = exported(model, randn(2, 200, 32, seed=0))
    assert_equal_at_every_length(program, model, batch=2)


@pytest.mark.usefixtures("no_cache_of_shapes")
def test_the_functional_form_and_a_model() -> None:
    class Functional(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            q = x.unflatten(2, (4, 8))
            k = q[:, :, :2]
            gates = torch.sigmoid(q[..., :3])
            return nsa_attention(q, *[(k, k)] * 3, gates, config=SMALL, path="masked", fa2="off")

    program = exported(Functional(), randn(1, 200, 32, seed=0))
    assert_equal_at_every_length(program, Functional())
    torch.manual_seed(0)
    model = TinyLM(
        ModelConfig(
            vocab_size=50, dim=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, nsa=SMALL
        )
    ).eval()
    ids = torch.randint(50, (1, 1024))
    program = exported(model, ids[:, :200])
    for tokens in LENGTHS:
        assert_parity(program(ids[:, :tokens]), model(ids[:, :tokens]), f"{tokens} tokens")


@pytest.mark.parametrize("path", [Path.REFERENCE, Path.V1])
def test_a_path_that_reads_on_the_host_says_so(path: Path) -> None:
    with pytest.raises(ValueError, match=rf"torch.export of path='{path}'.*wanted masked or v2"):
        exported(layer(path), randn(1, 200, 32, seed=0))
