"""Saves half of the time of `import keras` in processes that tests start.

Keras also imports these where they are installed, and nothing that runs with this folder on its PYTHONPATH uses
them. Looking for garbage among what an import makes takes a quarter of the rest, and finds none.
"""

import gc
import sys

gc.set_threshold(100_000)

for name in ("matplotlib", "pandas", "sklearn"):
    sys.modules[name] = None  # type: ignore[assignment]
