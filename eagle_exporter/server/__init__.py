"""The exporter process: reads the shared registry and serves it over HTTP.

`view` reads the registry and decides what is still shown of a rank that ended, `collector` turns it into
Prometheus families, `exposition` renders them, `windows` computes the breakdown of the last minutes, `app` is
the HTTP surface, `web_config` its TLS and passwords, `listener` the sockets and the server itself.
"""
