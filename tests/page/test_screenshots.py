"""The pictures of the docs: they can be made again, and they are small."""

import struct
import subprocess
import sys
from pathlib import Path

import pytest
from tests.page.browser import chromium

ROOT = Path(__file__).parents[2]
MOST_BYTES = 150_000


def size_of(picture: bytes) -> tuple[int, int]:
    assert picture.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", picture[16:24])
    return width, height


@pytest.mark.timeout(300)
def test_they_can_be_made_again(tmp_path: Path) -> None:
    """From half a minute of traffic: the real ones take a quarter of an hour of it."""
    with chromium():
        pass  # or the reason why not
    command = [sys.executable, "-m", "demos.screenshots", "--seconds", "30", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    sizes = {file.name: size_of(file.read_bytes()) for file in tmp_path.iterdir()}
    assert {name: width for name, (width, _) in sizes.items()} == {
        "page.png": 1240,
        "page-dark.png": 1240,
        "page-phone.png": 390,
    }
    assert sizes["page.png"][1] > 1000, "the whole page, not its first screen"


def test_those_of_the_docs_are_there_and_small() -> None:
    pictures = sorted((ROOT / "docs" / "images").glob("*.png"))
    readme = (ROOT / "README.md").read_text()
    assert len(pictures) >= 3
    for picture in pictures:
        assert picture.stat().st_size < MOST_BYTES, picture.name
        assert f"docs/images/{picture.name}" in readme
