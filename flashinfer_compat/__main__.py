"""`python -m flashinfer_compat`."""

from flashinfer_compat.cli import main

raise SystemExit(main())
