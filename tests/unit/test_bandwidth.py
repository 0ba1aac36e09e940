"""Bus factors, sizes and averages against values worked out by hand."""

import pytest

from common import bandwidth


@pytest.mark.parametrize(
    ("collective", "ranks", "factor"),
    [
        ("all_reduce", 1, 0),
        ("all_reduce", 2, 1),
        ("all_reduce", 4, 1.5),
        ("all_reduce", 8, 1.75),
        ("all_gather", 4, 0.75),
        ("reduce_scatter", 8, 0.875),
        ("all_to_all", 2, 0.5),
        ("gather", 5, 0.8),
        ("scatter", 5, 0.8),
        ("broadcast", 8, 1),
        ("reduce", 8, 1),
        ("sendrecv", 8, 1),
        ("all_gather_object", 4, 0.75),
        ("broadcast_object", 4, 1),
        # parts 1, 2 of 3: rank 0 keeps 1; parts 1..4 of 10: rank 0 keeps 1
        ("all_to_all_uneven", 2, 2 / 3),
        ("all_to_all_uneven", 4, 0.9),
        ("barrier", 4, None),
    ],
)
def test_bus_factor(collective: str, ranks: int, factor: float | None) -> None:
    found = bandwidth.bus_factor(collective, ranks)
    assert found == (None if factor is None else pytest.approx(factor))


def test_every_collective_has_a_factor() -> None:
    for name in bandwidth.COLLECTIVES:
        assert (bandwidth.bus_factor(name, 2) is None) == (name == "barrier")


def test_bandwidths() -> None:
    """64 MB in 10 ms among 4 ranks: 6.4 GB/s, and 1.5 times that on the bus."""
    assert bandwidth.bandwidths("all_reduce", 4, 64_000_000, 0.01) == (
        pytest.approx(6.4),
        pytest.approx(9.6),
    )


@pytest.mark.parametrize(
    ("text", "size"),
    [("8", 8), ("4K", 4096), ("64m", 2**26), ("1.5G", 3 * 2**29), ("2KiB", 2048), ("1MB", 2**20)],
)
def test_parse_size(text: str, size: int) -> None:
    assert bandwidth.parse_size(text) == size


@pytest.mark.parametrize("text", ["", "x", "-1", "1 X", "1e3", "K", "0x10"])
def test_parse_size_refuses(text: str) -> None:
    with pytest.raises(ValueError, match="expected a size"):
        bandwidth.parse_size(text)


def test_show_size() -> None:
    assert [bandwidth.show_size(s) for s in (0, 8, 1024, 3 * 2**20, 1500)] == [
        *("0B", "8B", "1K", "3M", "1500B"),
    ]


def test_scan_by_factor() -> None:
    assert bandwidth.scan(8, 64, None, None) == [8, 16, 32, 64]
    assert bandwidth.scan(4, 100, None, 3) == [4, 12, 36]
    assert bandwidth.scan(1, 4, None, 1.1) == [1, 2, 3, 4]  # at least one byte further
    assert bandwidth.scan(5, 5, None, 2) == [5]


def test_scan_by_step() -> None:
    assert bandwidth.scan(10, 50, 20, None) == [10, 30, 50]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((64, 8, None, None), "above"),
        ((8, 64, None, 1.0), "would not end"),
        ((8, 64, None, 0.5), "would not end"),
        ((8, 64, 0, None), "would not end"),
        ((0, 64, None, None), "at least 1 byte"),
        ((8, 64, None, float("nan")), "would not end"),
        ((8, 64, None, float("inf")), "would not end"),
        ((1, 2**40, 1, None), "too many"),
    ],
)
def test_scan_refuses(arguments: tuple[int, int, int | None, float | None], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bandwidth.scan(*arguments)


def test_counts_are_those_of_nccl_tests() -> None:
    assert bandwidth.counts("all_reduce", [8, 16], 4, 4) == [(8, 2), (16, 4)]
    # a rank brings a quarter; what does not divide is cut, the size shown is what is sent
    assert bandwidth.counts("all_gather", [64, 100], 4, 4) == [(64, 4), (96, 6)]
    # too small for one element each: that is what is measured, once
    assert bandwidth.counts("all_gather", [4, 8, 16, 20], 4, 4) == [(16, 1)]


def test_top_quarter() -> None:
    rates = [(2**i, float(i)) for i in range(8) for _ in ("out", "in")]
    assert bandwidth.top_quarter(rates) == [6, 6, 7, 7]
    assert bandwidth.top_quarter([(8, 1.0)]) == [1.0]
    assert bandwidth.mean([1, 2, 6]) == 3
    assert bandwidth.mean([]) == 0
