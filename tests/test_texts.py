import hashlib
import pydoc_data.topics
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcompress.texts import TextNotFound, load_text


def test_the_builtin_text_is_every_help_topic_in_order() -> None:
    text, _ = load_text("python-docs")
    topics = pydoc_data.topics.topics
    for key in sorted(topics):
        assert text.startswith(topics[key])
        text = text[len(topics[key]) :].removeprefix("\n")
    assert text == ""


@pytest.mark.skipif(sys.version_info[:3] != (3, 11, 7), reason="the topics differ between Python versions")
def test_the_builtin_text_of_python_3_11_7_has_the_known_hash() -> None:
    text, sha256 = load_text("python-docs")
    assert (
        sha256
        == hashlib.sha256(text.encode()).hexdigest()
        == "2a95af4ac93f5b719944030ce3769070ddf827d847cba42192afa8da989e5dc4"
    )


@given(content=st.text())
def test_a_file_is_read_as_it_is(tmp_path_factory: pytest.TempPathFactory, content: str) -> None:
    path = tmp_path_factory.getbasetemp() / "any.txt"
    path.write_bytes(content.encode())
    assert load_text(path) == (content, hashlib.sha256(content.encode()).hexdigest())


def test_a_mistyped_name_is_told_the_nearest_one() -> None:
    with pytest.raises(TextNotFound, match=r"'python-doc': .*No such file.*did you mean 'python-docs'"):
        load_text("python-doc")


def test_a_file_that_is_not_utf8_is_refused_with_the_byte(tmp_path: Path) -> None:
    path = tmp_path / "latin1.txt"
    path.write_bytes(b"caf\xe9")
    with pytest.raises(TextNotFound, match=r"latin1.txt' is not UTF-8 \(byte 3\)"):
        load_text(path)
