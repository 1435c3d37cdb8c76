"""The kernels here run in Triton's interpreter, which is chosen when they are first imported."""

import os

os.environ["TRITON_INTERPRET"] = "1"
