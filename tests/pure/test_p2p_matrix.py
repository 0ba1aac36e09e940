"""The plan, the flags and the tables of p2p_matrix.py."""

from pathlib import Path

import pytest

from benchmarks import p2p_matrix
from common.workloads import links


def test_the_key_of_a_round_says_who_meets() -> None:
    """12 ranks on 3 or on 4 nodes: three rounds each, of other pairs."""
    args = p2p_matrix.parse_args(["--by", "node", "--size", "1M"])
    messages = links.Messages(2**20, 8, 10)
    three, four = (p2p_matrix.plan(args, messages, nodes) for nodes in (3, 4))
    assert len(three) == len(four) == 3
    assert three[0][1] != four[0][1]
    assert three[0][0] != four[0][0]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            "--plot links",
            "expected a file that ends in .png, .svg or .pdf, got 'links'; e.g. links",
        ),
        ("--plot links.xyz", "expected a file that ends in .png, .svg or .pdf, got 'links.xyz'"),
        ("--plot .png", "expected a file that ends in .png, .svg or .pdf, got '.png'"),
        ("--size 0", "expected a size above 0, got '0'"),
    ],
)
def test_mistakes_of_p2p_matrix(
    words: str, line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SystemExit) as caught:
        p2p_matrix.parse_args(words.split())
    assert caught.value.code == 2
    assert line in capsys.readouterr().err


def test_where_no_plot_can_be_written(tmp_path: Path) -> None:
    """matplotlib would write folder.png.png, and say the rest after all was measured."""
    (tmp_path / "folder.png").mkdir()
    assert "this is a folder" in (p2p_matrix.why_no_plot(str(tmp_path / "folder.png")) or "")
    nowhere = str(tmp_path / "nowhere" / "links.png")
    assert "expected a folder that can be written" in (p2p_matrix.why_no_plot(nowhere) or "")
    assert p2p_matrix.why_no_plot(str(tmp_path / "links.svg")) is None


def test_many_links_are_listed_by_the_worst() -> None:
    pairs = [(a, b) for a in range(40) for b in range(a + 1, 40)]
    rows = [links.Link(a, b, 30 if (a, b) == (2, 5) else 10, 5, 5, 9) for a, b in pairs]
    _, latency, *_ = p2p_matrix.tables(rows, 40, "rank").split("\n\n")
    assert latency.splitlines()[:2] == ["worst 20 of 780 links:", "      2 -> 5     30"]
