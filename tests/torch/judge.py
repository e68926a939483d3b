"""Checks for the programs in this folder: prints a line for each check, and at the end how many passed. Run directly,
it tests itself."""

import contextlib
import io
import sys
import traceback

passed = failed = skipped = 0


def check(name, holds, what=""):
    global passed, failed
    passed, failed = passed + bool(holds), failed + (not holds)
    print(f"{'ok  ' if holds else 'FAIL'} {name}{': ' if what else ''}{what}", flush=True)


def skip(name, why):
    global skipped
    skipped += 1
    print(f"skip {name}: {why}", flush=True)


def run(test, *given):
    """Runs a test. A test that raises, or would exit, has failed, and the others continue."""
    try:
        test(*given)
    except (Exception, SystemExit) as error:
        traceback.print_exc(file=sys.stdout)
        check(" ".join(map(str, (test.__name__, *given))), False, f"it ended in {type(error).__name__}: {error}")


def finish():
    """The exit status."""
    print(f"{passed} passed, {failed} failed{f', {skipped} skipped' * (skipped > 0)}")
    return 1 if failed or not passed else 0


def broken_tests_count():
    """Tests that raise, or that exit with success, count as failed."""
    global passed, failed
    before = passed, failed
    with contextlib.redirect_stdout(io.StringIO()):
        for end in (lambda: 1 / 0, sys.exit, lambda: sys.exit(0)):
            run(end)
    seen = failed - before[1]
    passed, failed = before
    check("broken tests count", seen == 3, f"{seen} of 3 were counted")


if __name__ == "__main__":
    broken_tests_count()
    sys.exit(finish())
