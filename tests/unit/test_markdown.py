"""common/markdown.py: what cannot be anything but text."""

import html
import re

import pytest
from hostile import PAYLOADS

from common import markdown


@pytest.mark.parametrize(
    "word", ["resnet18", "1M/2G", "all_reduce", "±1.5%", "a (b), 3 + 4 = 7", "18:30 a: b"]
)
def test_plain_words_stay(word: str) -> None:
    assert markdown.escape(word) == word


@pytest.mark.parametrize("payload", PAYLOADS)
def test_nothing_is_left_of_markup(payload: str) -> None:
    escaped = markdown.escape(payload)
    assert not re.sub(r"&#\d+;", "", escaped).strip("abc").count("\n")
    assert not set(re.sub(r"&#\d+;", "", escaped)) & set('<>&|`*[]{}\\$#!~@"\r\n')
    assert "://" not in escaped
    assert "www." not in escaped
    if payload.isprintable():
        assert html.unescape(escaped) == " ".join(payload.split())


@pytest.mark.parametrize(
    ("word", "escaped"),
    [("_a_", "&#95;a&#95;"), ("a__b", "a__b"), ("a_", "a&#95;"), ("WWW.x", "www&#46;x")],
)
def test_underscores_and_links(word: str, escaped: str) -> None:
    assert markdown.escape(word) == escaped


def test_table() -> None:
    assert markdown.table(["a", ""], [["1|2", "3"]], [False, True]).splitlines() == [
        "| a |   |",
        "| :-- | --: |",
        "| 1&#124;2 | 3 |",
    ]
