"""The texts that experiments run on: the built-in one, or any file."""

import difflib
import hashlib
import pydoc_data.topics
from pathlib import Path

BUILT_IN = "python-docs"


class TextNotFound(ValueError):
    """The text asked for is neither the built-in one nor a readable UTF-8 file."""


def builtin_text() -> str:
    """English prose that every CPython carries: the topics of `help()`, 465 kB, in the order of their sorted keys.

    It differs between Python versions, so a record keeps its hash.
    """
    topics = pydoc_data.topics.topics
    return "\n".join(topics[key] for key in sorted(topics))


def load_text(name_or_path: str | Path) -> tuple[str, str]:
    """The text and the SHA-256 of its UTF-8 bytes (for a file, what `sha256sum` prints).

    `python-docs` is the built-in text, anything else a file; its line ends are kept as they are.

    Raises:
        TextNotFound: there is no such file, or it is not UTF-8.
    """
    if str(name_or_path) == BUILT_IN:
        text = builtin_text()
        return text, hashlib.sha256(text.encode()).hexdigest()
    path = Path(name_or_path).expanduser()
    try:
        content = path.read_bytes()
        return content.decode("utf-8"), hashlib.sha256(content).hexdigest()
    except OSError as error:
        hint = f"; did you mean {BUILT_IN!r}?" if difflib.get_close_matches(str(name_or_path), [BUILT_IN]) else ""
        raise TextNotFound(
            f"text {str(name_or_path)!r}: expected {BUILT_IN!r} or a UTF-8 file ({error.strerror}){hint}"
        ) from error
    except UnicodeDecodeError as error:
        raise TextNotFound(
            f"text {str(path)!r} is not UTF-8 (byte {error.start}): convert it, for instance with iconv"
        ) from error
