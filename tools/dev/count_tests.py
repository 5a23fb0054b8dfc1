"""Counts the test cases in a folder of GoogleTest XML reports and names the skipped ones."""

import pathlib
import sys
import xml.etree.ElementTree as ElementTree


def main() -> None:
    cases = 0
    skipped = []
    reports = sorted(pathlib.Path(sys.argv[1]).glob("*.xml"))
    for report in reports:
        for case in ElementTree.parse(report).iter("testcase"):
            cases += 1
            if case.find("skipped") is not None:
                skipped.append(f"{report.stem}: {case.get('classname')}.{case.get('name')}")
    print(f"{cases} test cases in {len(reports)} runs, {len(skipped)} skipped")
    for name in skipped:
        print(f"  skipped: {name}")


main()
