"""`python -m flashinfer_compat`."""

import sys

try:
    from flashinfer_compat.cli import main

    raise SystemExit(main())
except KeyboardInterrupt:
    # While the command line itself was being imported.
    print("interrupted", file=sys.stderr)
    raise SystemExit(130) from None
