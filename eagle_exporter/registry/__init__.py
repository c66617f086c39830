"""The shared registry: one memory-mapped file per rank, one writer each, any number of readers.

`layout` decides what is in a file and how it is described, `writer` is the hot path inside SGLang's scheduler
processes, `reader` is the exporter's side.
"""
