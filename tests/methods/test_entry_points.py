"""Methods that another installed package names by an entry point."""

import os
import subprocess
import sys
from pathlib import Path

METHOD = '''
from dataclasses import dataclass
from kvcompress.methods import Evicting

@dataclass(frozen=True)
class Newest(Evicting):
    """Keep the newest tokens."""
    count: int = 5
    name = "newest_of_theirs"
    acts = "prefill"

    def keep(self, layer):
        return layer.last([self.count] * len(layer.lengths))
'''
SCRIPT = """
import torch, kvcompress as kvc
from tests.tiny import tiny_llama
with kvc.wrap(tiny_llama(), "newest_of_theirs(count=3)") as wrapped:
    cache = wrapped.new_cache()
    wrapped.prefill(torch.arange(3, 23)[None], cache=cache)
    print(cache.kept(0)[0, 0].tolist())
"""


def installed(folder: Path, module: str, value: str) -> dict[str, str]:
    """An environment in which a package with this module and this entry point is installed."""
    (folder / "theirs.py").write_text(module)
    about = folder / "theirs-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[kvcompress.methods]\nnewest = {value}\n")
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}


def run(script: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=300)


def test_a_method_of_another_package_is_known_by_its_text(tmp_path: Path) -> None:
    done = run(SCRIPT, installed(tmp_path, METHOD, "theirs:Newest"))
    assert done.stdout.strip() == "[17, 18, 19]", done.stderr


def test_one_that_cannot_be_imported_is_named_and_the_rest_works(tmp_path: Path) -> None:
    script = "import kvcompress as kvc; print(sorted(kvc.methods()))"
    done = run(script, installed(tmp_path, "import not_installed_anywhere", "theirs"))
    assert "'snapkv'" in done.stdout
    assert "theirs names as 'theirs' cannot be imported (ModuleNotFoundError" in done.stderr
