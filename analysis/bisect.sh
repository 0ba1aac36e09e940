#!/usr/bin/env bash
# For `git bisect run`: is this commit slower than the good one? See docs/ci.md. The two run
# alternately. $MEASURE is a command that accepts --json, and $GOOD a worktree of the good commit.
# Only the verdict `slower` makes a commit bad. ab.py also ends with status 1 if a run fails, which
# says nothing about the speed of the commit, so the script reads the last line.
set -o pipefail
$MEASURE --json "$(mktemp)" || exit 125 # this commit does not run
table=$(mktemp)
python "$(dirname "$0")/ab.py" --out "$OUT/$(git rev-parse HEAD)" --runs "${RUNS:-6}" \
    --fail-on slower --a "env -C '$GOOD' $MEASURE" --b "$MEASURE" | tee "$table"
case $? in
    0) exit 0 ;; # good: every case has a verdict, and none is slower
    1) if grep -q '^# --fail-on slower: failed (.*slower' "$table"; then exit 1; fi ;; # bad
    4) ;; # no verdict
    *) exit 255 ;; # incorrect usage or Ctrl-C: git ends the bisection
esac
exit 125 # no verdict, a run or a case failed, or the disk is full: git skips the commit
