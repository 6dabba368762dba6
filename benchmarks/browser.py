"""How a page opens in Chromium: bytes, seconds until it can be used, memory; and a picture of it.

    python benchmarks/browser.py report/index.html --screenshot page.png

Needs selenium, chromium and chromedriver, as the tests of the page do.
"""

import argparse
import shutil
import tempfile
import time
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.common.by import By

FLAGS = "--headless=new --no-sandbox --disable-gpu --no-first-run --disable-background-networking"


def start(profile: str) -> webdriver.Chrome:
    """A browser without a network or a history."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for flag in [*FLAGS.split(), "--enable-precise-memory-info", f"--user-data-dir={profile}"]:
        options.add_argument(flag)
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))


def resident(driver: webdriver.Chrome) -> float:
    """Megabytes that the largest process of the browser, the one that has the page, holds of its own."""
    largest = 0
    for path in Path("/proc").glob("[0-9]*/smaps_rollup"):
        try:
            if b"--type=renderer" not in (path.parent / "cmdline").read_bytes():
                continue
            lines = dict(line.split(":") for line in path.read_text().splitlines()[1:])
        except OSError:  # it has ended meanwhile
            continue
        if str(driver.capabilities["chrome"]["userDataDir"]).encode() in (path.parent / "cmdline").read_bytes():
            largest = max(largest, int(lines["Pss"].split()[0]))
    return largest / 1e3


def main() -> None:
    """Open a page, use it, and print what it took."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("page", type=Path)
    parser.add_argument("--screenshot", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as profile:
        driver = start(profile)
        try:
            driver.execute_cdp_cmd(
                "Emulation.setDeviceMetricsOverride",
                {"width": 1280, "height": 900, "deviceScaleFactor": 1, "mobile": False},
            )
            driver.get(given.page.resolve().as_uri())
            timing = "return performance.getEntriesByType('navigation')[0].toJSON()"
            ready = driver.execute_script(timing)
            heap = driver.execute_script("return performance.memory.usedJSHeapSize") / 1e6
            print(f"{'page':<24}{given.page.stat().st_size / 1e6:>9.1f} MB")
            print(f"{'interactive after':<24}{ready['domInteractive'] / 1e3:>9.2f} s")
            print(f"{'complete after':<24}{ready['domComplete'] / 1e3:>9.2f} s")
            print(f"{'script memory':<24}{heap:>9.0f} MB")
            print(f"{'process':<24}{resident(driver):>9.0f} MB")
            begun = time.perf_counter()
            driver.find_element(By.ID, "find").send_keys("7")
            driver.execute_script("return document.getElementById('found').textContent")
            print(f"{'find, one letter':<24}{time.perf_counter() - begun:>9.2f} s")
            if given.screenshot:
                driver.execute_script("document.getElementById('images').scrollIntoView()")
                time.sleep(1)  # pictures are loaded when they are looked at
                driver.save_screenshot(str(given.screenshot))
        finally:
            driver.quit()


if __name__ == "__main__":
    main()
