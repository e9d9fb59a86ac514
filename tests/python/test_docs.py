"""The README's code runs as it stands, and the checker of the documents finds what it is for."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"

pytestmark = pytest.mark.skipif(not README.exists(), reason="not in a source tree")


@pytest.fixture(scope="module")
def check_docs() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_docs", ROOT / "tools/check_docs.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_readmes_code_runs(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.S)
    assert len(blocks) == 1
    assert "4096" in blocks[0]
    names: dict[str, object] = {}
    exec(blocks[0].replace("4096", "96"), names)
    assert tuple(names["o"].shape) == (1, 8, 96, 512)  # type: ignore[attr-defined]
    assert "kernel" in capsys.readouterr().out


def test_documents_are_sound(check_docs: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert check_docs.main() == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    ("target", "defect"),
    [
        ("b.md", None),
        ("b.md#two-words", None),
        ("#here", None),
        ("https://example.org/x", None),
        ("mailto:someone@example.org", None),
        ("c.md", "no such file"),
        ("b.md#three", "no such heading"),
        ("#there", "no such heading"),
        ("https://", "an address without a host"),
    ],
)
def test_links_are_followed(check_docs: ModuleType, tmp_path: Path, target: str, defect: str | None) -> None:
    (tmp_path / "a.md").write_text("# Here\n```\n# There\n```\n")
    (tmp_path / "b.md").write_text("text\n## Two, `words`\n")
    assert check_docs.link_defect(tmp_path / "a.md", target) == defect


def test_the_index_must_list_each_kernel_once(
    check_docs: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_docs, "ROOT", tmp_path)
    index, table = tmp_path / "index.md", tmp_path / "kernels.def"
    table.write_text(
        "// FFPA_KERNEL(note, ...)\nFFPA_KERNEL(a_fwd_x, f)\n  FFPA_KERNEL(b_fwd_y, f)\nFFPA_KERNEL(c_fwd_z, f)\n"
    )
    index.write_text("| kernel |\n| --- |\n| `a_fwd_x` |\n| `c_fwd_z` |\n| `c_fwd_z` |\n| `d_fwd_w` |\n")
    assert list(check_docs.check_kernels(index, table)) == [
        "index.md: b_fwd_y has 0 rows, must have 1",
        "index.md: c_fwd_z has 2 rows, must have 1",
        "index.md: d_fwd_w is not in kernels.def",
    ]
