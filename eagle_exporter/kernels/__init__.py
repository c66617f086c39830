"""What runs inside the phases: kernel captures, from a raw trace to seconds by phase and kernel class.

Nothing here runs in the scheduler but `files` (names and small files). A capture's trace is read by a process of its
own (``python -m eagle_exporter.kernels``), which the scheduler starts with the lowest priority. Standard library only.
"""
