"""Figures of a report in headless Chromium: `python tests/report/measure_page.py REPORT.html`.

Size, first paint, when the timeline is drawn, frames a second while it is panned and zoomed. Prints one JSON object.
"""

import json
import sys
from pathlib import Path

from browser import browser, open_page

_FRAMES = """
const [kind, milliseconds, done] = arguments;
const { timeline } = window.gdpReport, step = timeline.step;
const began = performance.now();
let frames = 0, slowest = 0, last = began;
const frame = now => {
  const part = (performance.now() - began) / milliseconds;
  if (part >= 1) {
    const spent = performance.now() - began;
    timeline.zoomTo(0, step);
    return done({ frames_per_second: frames / spent * 1000, slowest_frame_ms: slowest });
  }
  if (kind === "pan") timeline.zoomTo(part * step / 2, part * step / 2 + step / 2);
  else timeline.zoomTo(step / 2 - step / 2 * 0.001 ** part, step / 2 + step / 2 * 0.001 ** part);
  frames += 1;
  slowest = Math.max(slowest, now - last);
  last = now;
  requestAnimationFrame(frame);
};
requestAnimationFrame(frame);
"""
_TIMES = """
const entries = [...performance.getEntriesByType('paint'), ...performance.getEntriesByType('mark')];
return Object.fromEntries(entries.map(entry => [entry.name, Math.round(entry.startTime)]));
"""


def measure(path: Path) -> dict[str, object]:
    """The figures of the report in `path`; times in ms since the page was asked for."""
    with browser() as driver:
        driver.set_script_timeout(60)
        open_page(driver, path)
        figures: dict[str, object] = {"bytes": path.stat().st_size, **driver.execute_script(_TIMES)}
        for kind in ("pan", "zoom"):
            figures[kind] = driver.execute_async_script(_FRAMES, kind, 4000)
    return figures


if __name__ == "__main__":
    print(json.dumps(measure(Path(sys.argv[1]))))
