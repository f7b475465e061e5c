"""Saves a third of the time of `import tensorflow` in processes that tests start.

Keras also imports these where they are installed, and nothing that runs with this folder on its PYTHONPATH uses
them.
"""

import sys

for name in ("matplotlib", "pandas", "sklearn"):
    sys.modules[name] = None  # type: ignore[assignment]
