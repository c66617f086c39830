"""The Grafana dashboards as code, and a preview of them. Not part of the installed package."""
