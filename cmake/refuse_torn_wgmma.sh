#!/bin/bash
# refuse_torn_wgmma.sh COMMAND...: runs a compiler, and fails where ptxas says that a kernel waits behind
# every wgmma, or ignores what setmaxnreg says. Such a kernel is right and slow, and the advice a line
# among many.
output=$("$@" 2>&1)
code=$?
[[ -z $output ]] || printf '%s\n' "$output" >&2
[[ $code == 0 ]] || exit "$code"
grep -qE '\(C75[0-9]{2}\) Potential Performance Loss' <<<"$output" || exit 0
while (($# > 1)); do
  [[ $1 != -o ]] || rm -f "$2" # the next build would take it for finished
  shift
done
echo "error: ptxas tears wgmma's chains apart (advice above): the kernel needs fewer registers" >&2
exit 1
