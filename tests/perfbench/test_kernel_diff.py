"""Tables of one step, and which kernels changed between two: planted tables with sums done by
hand.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
from pydantic import ValidationError

from perfbench.records.kernel_table import NAME_CHARS, Kernel, Kernels, own_times, totalled
from perfbench.tracing import kernel_diff
from perfbench.tracing.kernel_diff import Kind

FLASH = (
    "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4>, false,"
    " true>(Flash_fwd_params)"
)
ADD = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>,"
    " std::array<char*, 3ul>>(int, float)"
)
MUL = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::MulFunctor<float>,"
    " std::array<char*, 3ul>>(int, float)"
)
GEMM_A, GEMM_B = (
    "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT",
    "nvjet_tst_192x192_64x4_1x2_h_bz_coopB_TNT",
)


def table(
    device: Any = "cuda",
    syncs: int | None = 0,
    tuned: dict[str, str] | None = None,
    **rows: tuple[int, float | None],
) -> Kernels:
    """Rows of (calls, ms)."""
    made = {
        name: Kernel(count=count, seconds=None if ms is None else ms / 1e3)
        for name, (count, ms) in rows.items()
    }
    return Kernels(device=device, rows=made, host_syncs=syncs, tuned=tuned or {})


def kinds(base: Kernels, candidate: Kernels) -> list[tuple[str, Kind]]:
    return [(change.name, change.kind) for change in kernel_diff.diff(base, candidate)]


def test_every_kind_of_change_the_largest_first() -> None:
    base = table(a=(2, 4.0), b=(1, 1.0), c=(3, 3.0), d=(1, 9.0), e=(5, 5.0))
    candidate = table(a=(2, 4.5), b=(1, 0.8), c=(6, 4.5), d=(1, 9.0), f=(1, 2.0))
    changes = kernel_diff.diff(base, candidate)
    assert [(c.name, c.kind) for c in changes] == [
        ("e", Kind.GONE),
        ("f", Kind.NEW),
        ("c", Kind.COUNT),
        ("a", Kind.SLOWER),
        ("b", Kind.FASTER),
    ]
    assert [round((c.delta_s or 0) * 1e3, 6) for c in changes] == [-5.0, 2.0, 1.5, 0.5, -0.2]
    assert [c.delta_count for c in changes] == [-5, 1, 3, 0, 0]
    per_call = [c.per_call_pct for c in changes]
    assert per_call[:2] == [None, None] and per_call[2:] == [
        pytest.approx(p) for p in (-25.0, 12.5, -20.0)
    ]


def test_the_order_does_not_depend_on_the_order_of_the_tables() -> None:
    rows = dict.fromkeys("zyxwv", (1, 1.0))
    candidate = dict.fromkeys("vwxyz", (1, 2.0))
    assert [name for name, _ in kinds(table(**rows), table(**candidate))] == list("vwxyz")


def test_without_times_the_calls_decide() -> None:
    base, candidate = (
        table(a=(2, None), b=(1, None), c=(9, None)),
        table(a=(2, None), b=(4, None), d=(30, None)),
    )
    assert kinds(base, candidate) == [("d", Kind.NEW), ("c", Kind.GONE), ("b", Kind.COUNT)]
    assert all(change.per_call_pct is None for change in kernel_diff.diff(base, candidate))
    lines = kernel_diff.summary(base, candidate)
    assert lines[0] == "device time unknown, was unknown" and lines[1] == "launches 36, were 12"
    cells = (
        kernel_diff.render_markdown(kernel_diff.diff(base, candidate)).splitlines()[4].split("|")
    )
    assert [cell.strip() for cell in cells[1:-1]] == [
        "`b`",
        "count changed",
        "1 -> 4",
        "-",
        "-",
        "-",
    ]


def test_a_row_without_a_time_leaves_no_total() -> None:
    assert table(a=(1, 1.0), b=(1, None)).total_s is None and table(
        a=(1, 1.0), b=(1, 2.0)
    ).total_s == pytest.approx(3e-3)


@pytest.mark.parametrize(
    ("base", "candidate", "kind"),
    [({}, {"a": (1, 1.0)}, Kind.NEW), ({"a": (1, 1.0)}, {}, Kind.GONE)],
)
def test_an_empty_side(base: dict[str, Any], candidate: dict[str, Any], kind: Kind) -> None:
    assert kinds(table(**base), table(**candidate)) == [("a", kind)]
    assert kernel_diff.summary(table(**base), table(**candidate))[0].count("unknown") == 1, (
        "nothing is not 0 ms"
    )


def test_equal_sides_say_so() -> None:
    assert kinds(table(a=(1, 1.0)), table(a=(1, 1.0))) == kinds(table(), table()) == []
    assert kernel_diff.render_markdown([]) == "No kernel differs in calls or time."


def test_another_variant_is_one_change_with_the_net_time() -> None:
    (change,) = kernel_diff.diff(table(**{GEMM_A: (24, 10.0)}), table(**{GEMM_B: (24, 12.0)}))
    assert (change.kind, change.name, change.was) == (Kind.VARIANT, GEMM_B, GEMM_A)
    assert change.delta_s == pytest.approx(2e-3) and change.per_call_pct == pytest.approx(20.0)
    row = kernel_diff.render_markdown([change]).splitlines()[2]
    assert f"another variant of `{GEMM_A}`" in row and "+2.000" in row and "10.000 -> 12.000" in row


@pytest.mark.parametrize(
    ("gone", "new"),
    [
        ((GEMM_A, 24), (GEMM_B, 12)),
        ((ADD, 24), (MUL, 24)),
        ((GEMM_A, 24), (FLASH, 24)),
        (("aten::mm", 2), ("aten::addmm", 2)),
    ],
    ids=["other-count", "other-operation", "other-kernel", "other-operator"],
)
def test_what_is_no_variant(gone: tuple[str, int], new: tuple[str, int]) -> None:
    found = kinds(table(**{gone[0]: (gone[1], 1.0)}), table(**{new[0]: (new[1], 2.0)}))
    assert sorted(kind for _, kind in found) == [Kind.GONE, Kind.NEW]


def test_each_variant_takes_one_place_the_nearest_in_time() -> None:
    base = table(gemm_1=(2, 1.0), gemm_2=(2, 8.0))
    changes = kernel_diff.diff(base, table(gemm_3=(2, 7.0), gemm_4=(2, 1.5), gemm_5=(2, 1.0)))
    assert {(c.was, c.name) for c in changes if c.kind is Kind.VARIANT} == {
        ("gemm_2", "gemm_3"),
        ("gemm_1", "gemm_4"),
    }
    assert [c.name for c in changes if c.kind is Kind.NEW] == ["gemm_5"]


def test_the_whole_step_and_a_changed_autotuner_in_words() -> None:
    base = table(a=(2, 4.0), syncs=1, tuned={"fwd[64]": "BLOCK: 64", "bwd[64]": "BLOCK: 32"})
    candidate = table(a=(3, 5.0), syncs=4, tuned={"fwd[64]": "BLOCK: 128", "bwd[64]": "BLOCK: 32"})
    assert kernel_diff.summary(base, candidate) == [
        "device time 5.000 ms, was 4.000 ms (+25.0 %)",
        "launches 3, were 2",
        "host syncs 4, were 1",
        "the autotuner of fwd[64] chose BLOCK: 128, was BLOCK: 64",
    ]
    on_cpu = kernel_diff.summary(table("cpu", None, a=(2, 4.0)), table("cpu", None, a=(2, 4.0)))
    assert on_cpu == ["operators' time 4.000 ms, was 4.000 ms (+0.0 %)", "operator calls 2, were 2"]


@pytest.mark.parametrize(
    ("name", "short"),
    [
        (FLASH, "pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits>"),
        (ADD, "native::vectorized_elementwise_kernel<CUDAFunctor_add>"),
        (MUL, "native::vectorized_elementwise_kernel<MulFunctor>"),
        (GEMM_A, GEMM_A),
        ("aten::mm", "aten::mm"),
        ("Memcpy HtoD (Pageable -> Device)", "Memcpy HtoD"),
        ("void (anonymous namespace)::softmax<float, 4>(float*)", "softmax"),
        ("void cut_off<8, SomeTraits<64, 12", "cut_off<SomeTraits>"),
        ("<lambda>", "<lambda>"),
        ("", ""),
        ("x" * 300, "x" * 67 + "..."),
    ],
)
def test_short_names(name: str, short: str) -> None:
    assert kernel_diff.short_name(name) == short


def test_names_that_look_alike_when_short_are_distinguished() -> None:
    names = [FLASH, FLASH.replace("64,", "128,", 1), GEMM_A]
    first, second, third = kernel_diff.labels(names)
    assert first != second and first.endswith("#1") and second.endswith("#2") and third == GEMM_A


def cells_of(row: str) -> list[str]:
    """As GitHub splits a table's row: an escaped bar is none."""
    return re.split(r"(?<!\\)\|", row)[1:-1]


HOSTILE = [
    "a|b",
    "back`tick",
    "``two``",
    "two\nlines\r\n",
    "| --- |",
    "<script>alert(1)</script>",
    "\x1b[31mred",
    "日本",
]


@pytest.mark.parametrize("name", HOSTILE)
def test_no_name_breaks_the_table(name: str) -> None:
    text = kernel_diff.render_markdown(
        kernel_diff.diff(table(other=(1, 1.0)), table(**{name: (1, 5.0)}, other=(1, 1.5)))
    )
    lines = text.rstrip("\n").split("\n")
    assert len(lines) == 4 and {len(cells_of(line)) for line in lines} == {6}
    assert "\x1b" not in text and "\r" not in text
    kernel = cells_of(lines[2])[0].strip()
    fence = re.match(r"`+", kernel)
    assert (
        fence
        and kernel.endswith(fence[0])
        and fence[0] not in kernel[len(fence[0]) : -len(fence[0])]
    )


def test_only_the_top_is_shown_and_the_rest_is_summed() -> None:
    base = table(**{f"k{n}": (1, 1.0) for n in range(14)})
    candidate = table(**{f"k{n}": (1, 2.0 + n) for n in range(14)})
    text = kernel_diff.render_markdown(kernel_diff.diff(base, candidate), top=10)
    assert text.count("slower per call") == 10 and "`k13`" in text and "`k3`" not in text
    assert "4 smaller changes not shown, together +10.000 ms." in text  # 1 + 2 + 3 + 4
    assert "not shown" not in kernel_diff.render_markdown(kernel_diff.diff(base, candidate), top=14)


def test_one_step_alone_the_longest_first() -> None:
    lines = kernel_diff.render_kernels(
        table(a=(1, 1.0), b=(2000, 7.5), c=(3, None)), top=2
    ).splitlines()
    assert lines[2:] == ["| `b` | 2,000 | 7.500 |", "| `a` | 1 | 1.000 |"]


def test_calls_of_one_name_are_added_up() -> None:
    rows = totalled([("a", 1000), ("b", 5), ("a", 500), ("x" * 5000, 1)])
    assert (
        rows["a"].count == 2
        and rows["a"].seconds == pytest.approx(1.5e-6)
        and rows["x" * NAME_CHARS].count == 1
    )


def test_an_operator_has_only_its_own_time() -> None:
    calls = [
        ("inner", 1, 20, 30),
        ("outer", 1, 0, 100),
        ("inmost", 1, 25, 5),
        ("inner", 1, 50, 10),
        ("after", 1, 100, 7),
        ("elsewhere", 2, 10, 50),
    ]
    assert own_times(calls) == [
        ("outer", 60),
        ("elsewhere", 50),
        ("inner", 25),
        ("inmost", 5),
        ("inner", 10),
        ("after", 7),
    ]
    assert own_times([("a", 1, 0, 10), ("odd", 1, 5, 50)]) == [
        ("a", 0),
        ("odd", 50),
    ], "never negative"


def test_nonsense_is_no_table() -> None:
    for row in (
        {"count": -1, "seconds": 1.0},
        {"count": 1, "seconds": float("nan")},
        {"count": 1, "seconds": -1.0},
    ):
        with pytest.raises(ValidationError):
            Kernel.model_validate(row)
