"""Calls one benchmark case a few times, for profile.sh to watch."""

from __future__ import annotations

import argparse
import sys

from peers import forced

from cufa2 import device, flash_attention, flash_attention_backward
from cufa2.problem import DTYPES
from cufa2.testing import CASES, make_inputs


def main() -> int:
    """Command line of profile.sh."""
    names = [c.name for c in CASES]
    parser = argparse.ArgumentParser(prog="profile.sh", description=__doc__)
    parser.add_argument("case", nargs="?", default="d128_s16k_causal", choices=names)
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES)
    parser.add_argument("--backward", action="store_true", help="the backward pass, too")
    parser.add_argument("--kernel", help="name of the forward row to force")
    parser.add_argument("--calls", type=int, default=1)
    args = parser.parse_args()
    if why := device.why_no_cuda():
        print(f"profile.sh: no GPU to profile on: {why}", file=sys.stderr)
        return 1
    cupy, case = device.cupy(), CASES[names.index(args.case)]
    q, k, v, do = (
        cupy.asarray(x.view(f"u{x.itemsize}")).view(x.dtype) for x in make_inputs(case, args.dtype)
    )
    with forced(args.kernel):
        for _ in range(args.calls):
            o, lse = flash_attention(q, k, v, return_lse=True, **case.options)
            if args.backward:
                flash_attention_backward(do, q, k, v, o, lse, **case.options)
    cupy.cuda.Device().synchronize()
    return 0


if __name__ == "__main__":
    sys.exit(main())
