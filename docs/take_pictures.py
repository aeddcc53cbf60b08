"""Takes pictures of pages in chromium: of the width of a telephone and of a screen, light and dark, as small PNGs.

python docs/take_pictures.py PAGE NAME               writes NAME-390-light.png, NAME-390-dark.png, NAME-1280-light...
python docs/take_pictures.py PAGE NAME 1280-light    writes that one
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

SIZES = {390: 1560, 1280: 1180}  # pixels: width, height
LOOKS = [f"{width}-{colours}" for width in SIZES for colours in ("light", "dark")]
COLOURS = 256  # of the palette, chosen to hold rare ones too: lines are a small part of a page
MOST_BYTES = 150_000
NARROWEST = 500  # window that chromium makes; narrower pages are looked at in a frame
FRAME = '<!DOCTYPE html><body style="margin:0"><iframe width="{}" height="{}" style="border:0" src="{}"></iframe>'


def take(page: Path, width: int, height: int, *, dark: bool, output: Path) -> None:
    """Take a picture of a page's top.

    Args:
        page: an HTML file.
        width, height: of the picture, in pixels.
        dark: how the page is asked to look.
        output: the PNG.
    """
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("error: no chromium; apt-get install chromium")
    with tempfile.TemporaryDirectory() as temporary:
        framed, taken = Path(temporary) / "framed.html", Path(temporary) / "taken.png"
        framed.write_text(FRAME.format(width, height, page.resolve().as_uri()), encoding="utf-8")
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        command += [f"--blink-settings=preferredColorScheme={0 if dark else 1}", "--virtual-time-budget=20000"]
        command += [f"--user-data-dir={temporary}/browser", f"--window-size={max(width, NARROWEST)},{height}"]
        subprocess.run(
            [*command, f"--screenshot={taken}", framed.as_uri()], check=True, timeout=300, capture_output=True
        )
        picture = Image.open(taken).convert("RGB").crop((0, 0, width, height))
        picture.quantize(COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(output, optimize=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path, metavar="PAGE", help="an HTML file, such as RUN/report.html")
    parser.add_argument("name", metavar="NAME", help="where the pictures go, and how their names begin")
    parser.add_argument("looks", nargs="*", metavar="LOOK", help=f"some of {', '.join(LOOKS)} [all]")
    options = parser.parse_args()
    if unknown := sorted(set(options.looks) - set(LOOKS)):
        parser.error(f"got {unknown[0]}, needs some of {', '.join(LOOKS)}")
    for look in options.looks or LOOKS:
        width, colours = look.split("-")
        output = Path(f"{options.name}-{look}.png")
        take(options.page, int(width), SIZES[int(width)], dark=colours == "dark", output=output)
        size = output.stat().st_size
        print(f"{output}: {size:,} bytes")
        if size > MOST_BYTES:
            print(f"error: {output} has more than {MOST_BYTES:,} bytes", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
