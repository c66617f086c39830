"""Stand-in. ``flashinfer.norm`` must not import: without it sgl_kernel uses its own CUDA kernel."""

from absent import stand_in

__version__ = "0.0.0"
__path__: list[str] = []
__getattr__ = stand_in("flashinfer", "flashinfer.norm")
