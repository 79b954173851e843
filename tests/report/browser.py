"""A headless Chromium for tests of pages; nothing in it may reach a network."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM, DRIVER = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")


@contextlib.contextmanager
def browser(width: int = 1280, height: int = 900) -> Iterator[Any]:
    """A driver whose page is `width` x `height` pixels."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "disable-gpu", "hide-scrollbars"):
        options.add_argument(f"--{argument}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    try:
        resize(driver, width, height)
        yield driver
    finally:
        driver.quit()


def resize(driver: Any, width: int, height: int = 900) -> None:
    """Make the page that wide; a window cannot be as narrow as a telephone."""
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def set_dark(driver: Any, is_dark: bool) -> None:
    """What the page is told that its reader prefers."""
    features = [{"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def open_page(driver: Any, path: Path, seconds: float = 60) -> None:
    """Open the file and wait until it says that it is drawn."""
    from selenium.webdriver.support.ui import WebDriverWait

    driver.get(path.resolve().as_uri())
    WebDriverWait(driver, seconds, 0.05).until(
        lambda there: there.execute_script("return document.documentElement.dataset.ready !== undefined")
    )


def screenshot(driver: Any, path: Path, whole: bool = True) -> None:
    """Write a picture of the page, below the window too if `whole`."""
    import base64

    size = driver.execute_cdp_cmd("Page.getLayoutMetrics", {})["cssContentSize"]
    clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
    picture = driver.execute_cdp_cmd(
        "Page.captureScreenshot", {"captureBeyondViewport": whole, **({"clip": clip} if whole else {})}
    )
    path.write_bytes(base64.b64decode(picture["data"]))
