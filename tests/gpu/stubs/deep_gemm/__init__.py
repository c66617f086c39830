"""Stand-in."""

from absent import stand_in

__version__ = "0.0.0"
__path__: list[str] = []
__getattr__ = stand_in("deep_gemm")
