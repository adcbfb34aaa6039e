"""``python -m scripts.count_tests FOLDER``: one line a kind from pytest's JUnit reports, and the sum.

Exits 1 when a report is missing its tests: a run that executed nothing has not passed.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path


def main(folder: Path) -> int:
    total = {"passed": 0, "failed": 0, "skipped": 0}
    empty = not list(folder.glob("*.xml"))
    for report in sorted(folder.glob("*.xml")):
        counts = dict.fromkeys(total, 0)
        for suite in ElementTree.parse(report).getroot().iter("testsuite"):
            failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
            skipped = int(suite.get("skipped", 0))
            counts["failed"] += failed
            counts["skipped"] += skipped
            counts["passed"] += int(suite.get("tests", 0)) - failed - skipped
        empty = empty or not sum(counts.values())
        print(f"{report.stem:18} {counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped")
        total = {key: total[key] + counts[key] for key in total}
    print(f"{total['passed']} passed, {total['failed']} failed, {total['skipped']} skipped")
    return 1 if empty or total["failed"] else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
