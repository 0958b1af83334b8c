"""Tiles of cards that give less than an H200: chosen by what they give, and compiled here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nsa.ops.interval import tile_sizes
from nsa.ops.kernels import common, tiles
from nsa.ops.selected.triton import tile_sizes as selected_sizes
from nsa.routing.cards import CARDS, HOPPER, LEAST, card_class, selected_backward_bytes
from perfbench.codegen.baseline import read_baseline_file
from tests.nsa.tile_build import SHAPES, TILED

ROOT = Path(__file__).parents[2]
CODE = ROOT / "reports" / "baselines" / "codegen" / "triton-3.7.1.txt"
# CUDA C++ Programming Guide, maximum shared memory per thread block: 163 and 99 KB
SHARED_BYTES = {80: 166_912, 89: 101_376, 100: 232_448}
MOST_SPILLED = 128
SM = {80: (8, 0), 89: (8, 9), 90: (9, 0), 100: (10, 0)}


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> object:
    """A function that lets this machine's device be a card's; put back at the end."""

    def forget() -> None:
        tiles.card_at.cache_clear()
        tiles.smaller.cache_clear()

    def set_to(sm: tuple[int, int] | None) -> None:
        forget()
        monkeypatch.setattr(tiles, "sm_of", lambda device: sm)

    yield set_to
    forget()


@pytest.mark.parametrize(
    ("arch", "shape"),
    [(89, "mla"), (80, "d256")],
)
def test_what_is_chosen_fits_and_spills_little(arch: int, shape: str) -> None:
    """The largest dims of each class of shared memory; at d 256 a card of 99 KB is refused. The
    matrices' dims are compiled by `perfbench codegen`.
    """
    command = [sys.executable, "-m", "tests.nsa.tile_build", str(arch), shape]
    done = subprocess.run(
        ["env", "-u", "TRITON_INTERPRET", *command],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    built = [(name, *map(int, rest)) for name, *rest in map(str.split, done.stdout.splitlines())]
    assert {name for name, *_ in built} == {*TILED}
    too_large = [one for one in built if one[1] > SHARED_BYTES[arch]]
    assert not too_large, f"more shared memory than SM {arch / 10} gives a program"
    spilling = [one for one in built if one[2] > MOST_SPILLED]
    assert not spilling, f"more than {MOST_SPILLED} bytes of a thread's registers in memory"
    _, _, DK, DV = SHAPES[shape]
    padded = common.padded(DK), common.padded(DV)
    (shared, rows), *_ = [(one[1], one[3]) for one in built if one[0] == "nsa_selected_backward"]
    if arch < 90:  # on others the router refuses nothing by it
        assert selected_backward_bytes(rows, 64, *padded, 2) == shared


@pytest.mark.parametrize(("arch", "shape", "dim"), [(80, "A", 64), (89, "A", 64), (89, "B", 128)])
def test_what_was_compiled_for_the_matrices_fits_as_it_was_reckoned(
    arch: int, shape: str, dim: int, on: object
) -> None:
    """By the lines that `perfbench codegen` keeps in git, and holds each build against."""
    sm = SM[arch]
    on(sm)  # type: ignore[operator]
    found = read_baseline_file(CODE).code
    (code,) = (
        code
        for one, code in found.items()
        if (one.kernel, one.name) == ("nsa_selected_backward", f"{shape}.lists")
        and one.sm == f"{sm[0]}.{sm[1]}"
    )
    heads = {"A": 12, "B": 64}[shape]
    q = torch.zeros(1, 1, heads, dim, dtype=torch.bfloat16)
    rows = selected_sizes.backward_tiles(q, dim, 64, 6 if shape == "A" else 16).M
    assert selected_backward_bytes(rows, 64, dim, dim, 2) == code.shared <= SHARED_BYTES[arch]
    spilling = {
        str(one): code.stack
        for one, code in found.items()
        if one.kernel in TILED and one.sm == f"{sm[0]}.{sm[1]}" and code.stack > MOST_SPILLED
    }
    assert not spilling, f"more than {MOST_SPILLED} bytes of a thread's registers in memory"


def test_cards_that_give_as_much_as_the_measured_one_keep_its_tiles(on: object) -> None:
    q = torch.zeros(1, 1, 16, 128, dtype=torch.bfloat16)
    for sm in (None, (9, 0)):
        on(sm)  # type: ignore[operator]
        for kernel, table in tile_sizes.TILES.items():
            for width in (None, 512):
                assert tile_sizes.tiles_of(kernel, q, 128, width) == table[1][width is not None]
        assert selected_sizes.backward_tiles(q, 128, 64, 16) is selected_sizes.BACKWARD[1]
        assert (
            selected_sizes.tiles_of("selected_forward", selected_sizes.FORWARD, q, 128)
            is (selected_sizes.FORWARD[1])
        )
        assert all(
            tiles.smaller(kernel, of_class, q.device) == {}
            for table in (*tiles.SMALLER.values(), tiles.TENSOR_MEMORY)
            for kernel in table
            for of_class in range(4)
        )


def test_cards_that_give_less_take_other_tiles(on: object) -> None:
    q = torch.zeros(1, 1, 16, 128, dtype=torch.bfloat16)
    wide = torch.zeros(1, 1, 16, 192, dtype=torch.bfloat16)
    on((8, 9))  # type: ignore[operator]
    assert tile_sizes.tiles_of("backward_q", q, 128, None)["BM"] == 64
    assert selected_sizes.backward_tiles(wide, 128, 64, 16).M == 16
    assert selected_sizes.backward_tiles(wide, 128, 64, 32).M == 32, "a query's heads share a tile"
    on((8, 0))  # type: ignore[operator]
    of_wide = selected_sizes.backward_tiles(wide, 128, 64, 16)
    assert of_wide.M == 32 and of_wide.segments == selected_sizes.BACKWARD[2].segments
    on((10, 0))  # type: ignore[operator]
    assert tile_sizes.tiles_of("backward_q", q, 128, None) == tile_sizes.TILES["backward_q"][1][0]
    assert tiles.smaller("selected_backward", 0, q.device)["num_warps"] == 8


def test_descriptors_are_for_multiplies_that_read_shared_memory(
    on: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(common, "COPY_MIN_ELEMENTS", 0)
    x = torch.zeros(1, 64, 2, 64)
    for sm, wanted in ((None, True), ((9, 0), True), ((10, 0), True), ((8, 0), False)):
        on(sm)  # type: ignore[operator]
        assert common.described(64, x, work=x.numel())[1] is wanted
    on((12, 0))  # type: ignore[operator]
    assert not common.described(64, x, work=x.numel())[1]


def test_what_a_card_gives() -> None:
    assert card_class(None) is HOPPER and card_class((13, 0)) == LEAST
    assert min(card.shared_bytes for card in CARDS.values()) == LEAST.shared_bytes
    assert {card_class(SM[arch]).shared_bytes: arch for arch in SHARED_BYTES} == {
        wanted: arch for arch, wanted in SHARED_BYTES.items()
    }
