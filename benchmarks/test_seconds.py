"""Seconds of the test suite by file, from the reports that `make check` and `make test` leave in build/.

  python -m benchmarks.test_seconds build/check.xml build/test.xml [--before OLD.xml ...]

Two test processes run at a time, so that a run takes about half the sum. Set-up of a fixture counts for the test that
needed it first.
"""

import argparse
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reports", nargs="+", type=Path, help="JUnit reports, as pytest --junitxml writes them")
    parser.add_argument("--before", nargs="+", type=Path, default=[], help="reports of an older version, to compare with")
    options = parser.parse_args()
    print(table(seconds_by_file(options.reports), seconds_by_file(options.before)))
    for report in (*options.before, *options.reports):
        print(f"{report}: {wall_seconds(report) / 60:.1f} min from beginning to end")


def wall_seconds(report: Path) -> float:
    """Wall time of a test run in seconds."""
    return sum(float(suite.attrib["time"]) for suite in ElementTree.parse(report).iter("testsuite"))


def seconds_by_file(reports: list[Path]) -> dict[str, tuple[int, float]]:
    """Number of tests and their seconds, by dotted module name."""
    found: dict[str, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
    for report in reports:
        for case in ElementTree.parse(report).iter("testcase"):
            number, seconds = found[case.attrib["classname"]]
            found[case.attrib["classname"]] = number + 1, seconds + float(case.attrib["time"])
    return dict(found)


def table(now: dict[str, tuple[int, float]], before: dict[str, tuple[int, float]]) -> str:
    """Markdown table, the slowest file first; folders whose files take less than 2 s each are summed up."""
    absent = (0, 0.0)
    columns = ("tests before", "seconds before", "tests", "seconds") if before else ("tests", "seconds")
    lines = ["| file | " + " | ".join(columns) + " |", "|---" + "|---:" * len(columns) + "|"]
    summed: dict[str, list[str]] = defaultdict(list)
    for name in sorted({*now, *before}, key=lambda each: -max(now.get(each, absent)[1], before.get(each, absent)[1])):
        if max(now.get(name, absent)[1], before.get(name, absent)[1]) < 2.0:
            summed[name.rpartition(".")[0]].append(name)
        else:
            lines.append(_row(name.removeprefix("tests.").replace(".", "/"), [name], now, before))
    for folder, names in sorted(summed.items()):
        title = f"{len(names)} other files of {folder.removeprefix('tests.').replace('.', '/')}"
        lines.append(_row(title, names, now, before))
    lines.append(_row("**all**", sorted({*now, *before}), now, before))
    return "\n".join(lines)


def _row(title: str, names: list[str], now: dict[str, tuple[int, float]], before: dict[str, tuple[int, float]]) -> str:
    cells = []
    for found in (before, now) if before else (now,):
        numbers = [found[name] for name in names if name in found]
        cells += [str(sum(number for number, _ in numbers)), f"{sum(seconds for _, seconds in numbers):.0f}"]
    return f"| {title} | " + " | ".join(cells) + " |"


if __name__ == "__main__":
    main()
