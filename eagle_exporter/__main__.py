"""Entry for ``python -m eagle_exporter``, which is how the plugin starts the exporter process."""

import sys

from eagle_exporter.cli import main

if __name__ == "__main__":
    sys.exit(main())
