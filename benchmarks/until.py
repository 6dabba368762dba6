"""How often the interval that ends `evaluate --until` contains the true median, and how many images it takes.

Sizes are drawn from distributions whose median is 1, image by image, until the interval is narrow. An interval that is
looked at after every image is narrow by luck now and then, so it contains the median less often than the 95 % of one
that is looked at once.

    python benchmarks/until.py
"""

import argparse

import numpy as np

from segprox.sizes import is_narrow, median_interval

SPREADS = {"log-normal, 0.3": 0.3, "log-normal, 0.6": 0.6}
SHARES = (0.2, 0.1, 0.05)
MOST = 3000  # images


def images_needed(sizes: np.ndarray, share: float) -> int:
    return next((count for count in range(1, len(sizes)) if is_narrow(sizes[:count], share)), len(sizes))


def contains_median(sizes: np.ndarray) -> bool:
    low, high = median_interval(sizes)
    return bool(low <= 1 <= high)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=1000)
    trials = parser.parse_args().trials
    print("| sizes | until | images, median | 10 % | 90 % | contains the median | as many images, looked at once |")
    print("|---|---|---|---|---|---|---|")
    for name, spread in SPREADS.items():
        for share in SHARES:
            source = np.random.default_rng(0)
            counts, stopped, once = [], [], []
            for _ in range(trials):
                sizes, others = np.exp(spread * source.normal(size=(2, MOST)))
                counts.append(images_needed(sizes, share))
                stopped.append(contains_median(sizes[: counts[-1]]))
                once.append(contains_median(others[: counts[-1]]))
            few, middle, many = np.quantile(counts, [0.1, 0.5, 0.9])
            shares = f"{np.mean(stopped):.1%} | {np.mean(once):.1%}"
            print(f"| {name} | {share:.0%} | {middle:.0f} | {few:.0f} | {many:.0f} | {shares} |", flush=True)


if __name__ == "__main__":
    main()
