"""Built-in texts and files."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

import pytest

from moe_ref import text
from moe_ref.errors import UsageError


def test_excerpt_is_frozen() -> None:
    data = text.excerpt()
    assert len(data) == text.EXCERPT_BYTES == 65536
    assert hashlib.sha256(data).hexdigest() == "c3dd115a832a9083dde52960faab0e4c093bea9394db86ca9b4760da55a45f80"


def test_excerpt_has_its_notice() -> None:
    notice = (Path(text.__file__).parent / "assets" / "excerpt.NOTICE.txt").read_text()
    assert "Python Software Foundation License Version 2" in notice
    assert "Copyright (c) 2001-2023 Python Software Foundation" in notice
    assert "nonexclusive, royalty-free, world-wide license" in notice
    assert "Summary of changes" in notice


def test_prose_holds_every_topic_in_order() -> None:
    from pydoc_data.topics import topics

    data = text.prose()
    assert len(data) > 300_000
    position = -1
    for key in sorted(topics):
        found = data.find(topics[key].encode(), max(position, 0))
        assert found > position, f"topic {key} is missing or out of order"
        position = found


def test_code_is_the_source_of_modules_in_order() -> None:
    data = text.code()
    assert len(data) > 1_000_000
    import argparse
    import typing

    first, second = (Path(module.__file__ or "").read_bytes() for module in (argparse, typing))
    assert 0 <= data.find(first) < data.find(second)


@pytest.mark.parametrize("name", text.BUILT_IN)
def test_load_built_in(name: str) -> None:
    loaded = text.load_text(name, 1000)
    assert loaded.data == getattr(text, name)()[:1000]
    assert not loaded.repeated
    assert loaded.note is None


def test_text_shorter_than_needed_is_repeated_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_bytes(b"abc\x00\xff")
    loaded = text.load_text(str(path), 12)
    assert loaded.data == b"abc\x00\xffabc\x00\xffab"
    assert loaded.repeated
    assert loaded.note == f"{path} has 5 bytes, 12 were needed: it was repeated from its start"
    exact = text.load_text(str(path), 5)
    assert exact.data == b"abc\x00\xff"
    assert not exact.repeated


def test_no_bytes_wanted(tmp_path: Path) -> None:
    path = tmp_path / "one"
    path.write_bytes(b"x")
    assert text.load_text(str(path), 0).data == b""
    assert text.load_text("excerpt", 0).note is None


def test_bad_files(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"no file .*gone.txt; expected a file of text .any bytes., or one of prose, code, excerpt"
    ):
        text.load_text(str(tmp_path / "gone.txt"), 10)
    with pytest.raises(UsageError, match=r"is a folder, expected a file"):
        text.load_text(str(tmp_path), 10)
    empty = tmp_path / "empty"
    empty.touch()
    with pytest.raises(UsageError, match=r"is empty; expected a file of at least one byte"):
        text.load_text(str(empty), 10)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match=r"pipe is no regular file \(a device, a pipe or a socket\), expected a file"):
        text.load_text(str(tmp_path / "pipe"), 10)
    with pytest.raises(UsageError, match=r"the name of the text is empty; expected a file"):
        text.load_text("", 10)
    with pytest.raises(ValueError, match=r"length is -1, expected at least 0"):
        text.load_text("prose", -1)


def test_only_what_is_needed_is_read(tmp_path: Path) -> None:
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.write(b"abc")
        file.truncate(10**11)
    loaded = text.load_text(str(path), 5)
    assert loaded.data == b"abc\0\0"
    assert loaded.available == 10**11
    assert not loaded.repeated


def test_python_without_the_texts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    text.prose.cache_clear()
    with pytest.raises(UsageError, match=r"no pydoc_data.topics.*use --text excerpt"):
        text.prose()
    monkeypatch.setattr(text.sysconfig, "get_path", lambda name: str(tmp_path))
    text.code.cache_clear()
    with pytest.raises(UsageError, match=r"no source files of the standard library.*use --text prose"):
        text.code()
