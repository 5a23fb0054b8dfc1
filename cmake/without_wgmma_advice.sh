#!/bin/bash
# without_wgmma_advice.sh COMMAND...: runs nvcc and leaves out what ptxas says, and no option of its
# silences, of every kernel with wgmma or setmaxnreg that is not optimised.
set -o pipefail
"$@" 2>&1 | { grep -vE '^ptxas info +: \(C75[0-9]{2}\) Potential Performance Loss: ' || true; }
