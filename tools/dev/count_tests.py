"""Counts the test cases in a folder of JUnit XML reports and names the skipped ones.

The exit code is 1 where one was skipped for another reason than that this machine lacks something.
"""

import pathlib
import re
import sys
import xml.etree.ElementTree as ElementTree

# What a machine may lack, as the tests say it.
LACKS = re.compile(
    r"no CUDA device|a second GPU is needed|torch sees one GPU|sees no GPU|no (torch|cupy|jax): "
    r"|libcublas|the code that runs here has no |this CPU has no AMX"
    r"|looks for blocks in the host's memory"
)


def main() -> int:
    cases = 0
    skipped = []
    unknown = []
    reports = sorted(pathlib.Path(sys.argv[1]).glob("*.xml"))
    for report in reports:
        for case in ElementTree.parse(report).iter("testcase"):
            cases += 1
            skip = case.find("skipped")
            if skip is None:
                continue
            name = f"{report.stem}: {case.get('classname')}.{case.get('name')}"
            skipped.append(name)
            reason = skip.get("message") or skip.text or ""
            if not LACKS.search(reason):
                unknown.append(f"{name}: {reason.splitlines()[-1] if reason else 'no reason'}")
    print(f"{cases} test cases in {len(reports)} runs, {len(skipped)} skipped")
    for name in skipped:
        print(f"  skipped: {name}")
    for name in unknown:
        print(f"FAILED, for no machine needs to skip it: {name}")
    return 1 if unknown else 0


sys.exit(main())
